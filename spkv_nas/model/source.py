"""Where a model's files are: in a folder, embedded in the package, or on the hub at a revision.

On the command line, in recipes and in results a model is one text: a folder, ``embedded:dense``, an id of the hub, or
``ID@REVISION``, as Hugging Face's file system writes it; a revision is a branch, a tag or a commit. A branch may move
while a command works, so its commit is asked for once, and everything is read at that.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from spkv_nas.base.assets import EMBEDDED, EMBEDDED_PREFIX
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import StrPath, read_json
from spkv_nas.model.weight_files import FILE, INDEX, index_names, is_index

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CONFIG, _GENERATION = "config.json", "generation_config.json"


def resolve(path_or_id: StrPath) -> Path:
    """A path, or the folder of an embedded checkpoint: ``embedded:dense`` or ``embedded:reference``."""
    text = os.fspath(path_or_id)
    if not text.startswith(EMBEDDED_PREFIX):
        return Path(text)
    folder = EMBEDDED / text.removeprefix(EMBEDDED_PREFIX)
    if not folder.is_dir():
        names = sorted(f"{EMBEDDED_PREFIX}{p.name}" for p in EMBEDDED.iterdir() if (p / _CONFIG).is_file())
        raise UserError(f"no embedded checkpoint '{text}'; there are: {', '.join(names)}")
    return folder


def check_checkpoint(path_or_id: str | Path) -> None:
    """Check that there is a model folder with a config, without torch. An id is looked up in the hub's cache or online.

    Raises:
        UserError: naming what is missing.
    """
    folder = _local(path_or_id)
    if folder is None:
        return
    if not folder.is_dir():
        raise UserError(f"cannot load model {path_or_id}: it is a file, where a checkpoint is a folder")
    if not (folder / _CONFIG).is_file():
        raise UserError(f"cannot load model {path_or_id}: there is no {_CONFIG} in that folder")
    read_json(folder / _CONFIG, "config")


def check_config(path_or_id: str | Path) -> None:
    """Check as ``check_checkpoint`` where a config file does as well as a folder. Raises ``UserError``."""
    path = _local(path_or_id)
    if path is None or path.is_dir():
        check_checkpoint(path_or_id)
    else:
        read_json(path, "config")


def _local(path_or_id: str | Path) -> Path | None:
    """The path that a model names, or None of an id. Raises ``UserError`` for what is neither."""
    path = resolve(path_or_id)
    if path.exists():
        return path
    source = str(path_or_id)
    if _ID.fullmatch(split_revision(source)[0]) is None:
        raise UserError(f"cannot load model {source}: there is no such folder")
    try:
        config_place(source)
    except OSError as error:
        raise UserError(f"cannot load model {source}: {first_line(error)}") from error
    return None


def split_revision(source: str) -> tuple[str, str | None]:
    """(id, revision) of ``ID@REVISION``; a path, or an id alone, as it is."""
    name, found, revision = source.partition("@")
    if not found or not revision or _ID.fullmatch(name) is None or Path(source).exists():
        return source, None
    return name, revision


def at_revision(source: str, revision: str | None) -> str:
    """Return ``ID@REVISION`` of an id. Raises ``UserError``: the source is a folder, or has a revision already."""
    if revision is None:
        return source
    if Path(source).exists() or split_revision(source)[1] is not None:
        raise UserError(f"model {source} is not an id without a revision, so it has no revision '{revision}'")
    return f"{source}@{revision}"


def pinned(source: str) -> tuple[str, str | None]:
    """(path or id, commit) to load from: None of a path, or of a repository without a config.

    Raises:
        OSError: there is no such repository or revision, or it cannot be reached.
    """
    if Path(source).exists():
        return source, None
    name, revision = split_revision(source)
    return name, _commit(name, revision) or revision


def commit_of(path_or_id: str | Path) -> str | None:
    """The commit that a model on the hub is read at; None of a folder. Raises ``OSError`` as ``pinned``."""
    return pinned(str(resolve(path_or_id)))[1]


@cache
def _commit(name: str, revision: str | None) -> str | None:
    from transformers.utils import cached_file

    file = cached_file(name, _CONFIG, revision=revision)
    return None if file is None else Path(file).parent.name


def config_place(source: str) -> Path:
    """What a config is read from: the path itself, or of an id the folder of the hub's cache. Raises ``OSError``."""
    from transformers.utils import cached_file

    name, commit = pinned(source)
    if Path(source).exists():
        return Path(source)
    file = cached_file(name, _CONFIG, revision=commit)
    if file is None:
        raise OSError(f"{source} has no {_CONFIG}")
    return Path(file).parent


def model_folder(source: str, explicit: str | None = None) -> Path:
    """The folder with a model's config and weights: ``source``, or of an id one of the hub's cache, downloaded to.

    Args:
        explicit: the file or index that the config names in place of the usual ones.

    Raises:
        UserError: an index of shards is damaged, or names anything else than files beside it.
        OSError: a file of the repository is not in the cache and cannot be had.
    """
    from transformers.utils.hub import cached_file, cached_files

    if Path(source).is_dir():
        return Path(source)
    folder = config_place(source)
    name, commit = pinned(source)

    def get(file: str) -> str | None:
        found: str | None = cached_file(name, file, revision=commit, _raise_exceptions_for_missing_entries=False)
        return found

    get(_GENERATION)
    usual = (FILE, INDEX) if explicit is None else (explicit,)
    found = next((file for file in usual if get(file) is not None), None)
    if found is not None and is_index(found):
        cached_files(name, index_names(folder / found), revision=commit)
    return folder
