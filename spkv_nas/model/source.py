"""Locate a model's files: in a folder or a GGUF file, embedded in the package, or on the hub at a revision.

A model is one string: a folder, a file ``*.gguf``, ``embedded:dense``, a hub id, or ``ID@REVISION``. A branch may move
while a command runs, so its commit is looked up once, and everything is read at that commit.
"""

import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from spkv_nas.base.assets import EMBEDDED, EMBEDDED_PREFIX
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import StrPath, read_json
from spkv_nas.model import gguf, weight_files

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CONFIG = "config.json"
# Files of a hub repository to download besides config, weights and tokenizer
_COMPANIONS = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "USE_POLICY.md",
    "README.md",
)


def resolve(path_or_id: StrPath) -> Path:
    """Return a path, or the folder of an embedded checkpoint: ``embedded:dense`` or ``embedded:reference``.

    Of a GGUF file it is the folder that the file was converted to (``gguf.converted``).
    """
    text = os.fspath(path_or_id)
    if gguf.is_gguf(text):
        return gguf.converted(Path(text).expanduser())
    if not text.startswith(EMBEDDED_PREFIX):
        return Path(text).expanduser()
    folder = EMBEDDED / text.removeprefix(EMBEDDED_PREFIX)
    if not folder.is_dir():
        names = sorted(
            f"{EMBEDDED_PREFIX}{p.name}" for p in EMBEDDED.iterdir() if (p / _CONFIG).is_file()
        )
        raise UserError(f"no embedded checkpoint '{text}'; there are: {', '.join(names)}")
    return folder


def check_checkpoint(path_or_id: str | Path) -> None:
    """Check, without torch, that a model folder with a config exists. Ids are looked up in the cache or online.

    Raises ``UserError``: something is missing, which the message names.
    """
    folder = _local(path_or_id)
    if folder is None:
        return
    if not folder.is_dir():
        raise UserError(
            f"cannot load model {path_or_id}: a checkpoint is a folder, "
            "but this is a file and no folder"
        )
    weight_files.check_format(folder)
    read_model_config(folder / _CONFIG)


def check_config(path_or_id: str | Path) -> None:
    """Check as ``check_checkpoint``, but accept a config file instead of a folder. Raises ``UserError``."""
    path = _local(path_or_id)
    if path is None or path.is_dir():
        check_checkpoint(path_or_id)
    else:
        read_model_config(path)


def config_path(path_or_id: str) -> Path:
    """Return the folder, config file or GGUF file that says what a model is, without converting it.

    Raises ``UserError``: there is none.
    """
    if gguf.is_gguf(path_or_id):
        return Path(path_or_id).expanduser()
    path = _local(path_or_id)
    return config_folder(path_or_id) if path is None else path


def read_model_config(file: Path) -> dict[str, object]:
    """Read a model's ``config.json``. Raises ``UserError`` if it is damaged, or of a model that cannot be loaded."""
    content = read_json(file, "config")
    quantization = content.get("quantization")
    if isinstance(quantization, dict) and "group_size" in quantization:
        raise UserError(
            f"config {file} is of a model quantized by mlx-lm, whose weights only MLX reads\n"
            "give the model from which it was quantized"
        )
    return content


def _local(path_or_id: str | Path) -> Path | None:
    """Return the path that a model names, or None for a hub id. Raises ``UserError`` if it is neither."""
    path = resolve(path_or_id)
    if path.exists():
        return path
    source = str(path_or_id)
    try:
        config_folder(source)
    except OSError as error:
        raise UserError(f"cannot load model {source}: {first_line(error)}") from error
    return None


def split_revision(source: str) -> tuple[str, str | None]:
    """Split ``ID@REVISION`` into id and revision; return a path, or an id alone, with None."""
    name, _, revision = source.partition("@")
    is_id = _ID.fullmatch(name) is not None
    if not revision or not is_id or Path(source).exists():
        return source, None
    return name, revision


def is_on_hub(name: str) -> bool:
    """Return whether a name that a config recorded is ORG/NAME of a hub repository rather than a path."""
    return "/" in name and _ID.fullmatch(name) is not None and not Path(name).exists()


def at_revision(source: str, revision: str | None) -> str:
    """Return ``ID@REVISION`` of an id. Raises ``UserError``: the source is a folder, or has a revision already."""
    if revision is None:
        return source
    if Path(source).exists() or split_revision(source)[1] is not None:
        raise UserError(
            f"model {source} must be a hub ID without a revision to take the revision '{revision}'"
        )
    return f"{source}@{revision}"


def pinned(source: str) -> tuple[str, str | None]:
    """Return (path or id, commit) to load from; the commit is None for a path, or a repository without a config.

    Raises:
        OSError: no such repository or revision, or it cannot be reached.
    """
    if Path(source).exists():
        return source, None
    name, revision = split_revision(source)
    folder = _snapshot(name, revision)
    return name, revision if folder is None else folder.name


@cache
def _snapshot(name: str, revision: str | None) -> Path | None:
    """Look up the folder of a hub id in the hub cache, named by its commit, once per process; None without a config."""
    from transformers.utils import cached_file

    file = cached_file(name, _CONFIG, revision=revision)
    return None if file is None else Path(file).parent


def config_folder(source: str) -> Path:
    """Return where to read a config from: the path, or an id's folder in the hub cache.

    Raises:
        UserError: it is an adapter, or a folder without a config.
        OSError: as ``pinned``; the repository has no config.
    """
    # Check a folder
    if Path(source).exists():
        if Path(source).is_dir():
            weight_files.check_format(Path(source))
        return Path(source)
    # Look a repository up
    name, revision = split_revision(source)
    if _ID.fullmatch(name) is None:
        raise UserError(f"cannot load model {source}: the folder does not exist")
    try:
        folder = _snapshot(name, revision)
    except OSError as error:
        _check_adapter(source, is_reachable="does not appear to have a file" in str(error))
        raise OSError(
            f"there is no such folder, and the Hugging Face Hub answered: {first_line(error)}"
        ) from error
    if folder is None:
        raise OSError(f"{source} has no {_CONFIG}")
    return folder


def _check_adapter(source: str, *, is_reachable: bool) -> None:
    """Raise ``UserError`` if a repository without a config is an adapter; use the cache alone if it is unreachable."""
    from transformers.utils import cached_file

    name, revision = split_revision(source)
    with suppress(OSError):
        file = cached_file(
            name, weight_files.ADAPTER, revision=revision, local_files_only=not is_reachable
        )
        if file is not None:
            raise UserError(weight_files.adapter_message(source, Path(file)))


def model_folder(source: str) -> Path:
    """Return the folder with a model's config and weights, downloading those of a hub id to the hub cache.

    Raises:
        UserError: an index of shards is damaged, or names anything but files beside it.
        OSError: a file of the repository is not in the cache and cannot be downloaded.
    """
    from transformers.utils.hub import cached_file, cached_files

    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists():
        raise UserError(
            f"cannot load model {source}: a checkpoint is a folder, "
            "but this is a file and no folder"
        )
    folder = config_folder(source)
    name, commit = pinned(source)

    def get(file: str) -> str | None:
        path: str | None = cached_file(
            name, file, revision=commit, _raise_exceptions_for_missing_entries=False
        )
        return path

    # Download the companion files, then the weights with all shards
    for companion in _COMPANIONS:
        get(companion)
    weights = next(
        (file for file in weight_files.weight_names(folder) if get(file) is not None), ""
    )
    if weights.endswith(weight_files.INDEX_ENDING):
        cached_files(name, weight_files.index_names(folder / weights), revision=commit)
    return folder
