"""The files that a model's weights are in, and what they become in another folder.

A shard index may name files anywhere, which is an error here. Weights that stay what they are go into another folder
as files: no tensor is read, and the shards are the same.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import read_json
from spkv_nas.base.hashes import file_hashes, named_hash

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pt", "consolidated.00.pth", "model.pt")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}\.safetensors")
_FICLONE = 0x40049409  # of Linux: <linux/fs.h>


def check_files(folder: Path, explicit: str | None = None) -> list[Path]:
    """The files that hold a model folder's weights, checked; links, as in the hub's cache, are files too.

    Args:
        explicit: the file or index that the config names in place of the usual ones.

    Raises:
        UserError: there are none in safetensors, or the index of their shards is damaged, or names what is not a file
            of the folder.
    """
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"model {folder} is an adapter of another model: merge the two and give the folder of the result"
        )
    if explicit is not None and not is_index(explicit):
        return [_checked_file(folder, explicit, f"the config of model {folder}")]
    if explicit is None and (folder / FILE).is_file():
        return [folder / FILE]
    index = folder / (INDEX if explicit is None else explicit)
    if not index.is_file():
        raise UserError(_no_weights(folder))
    return [_checked_file(folder, name, f"index of weights {index}") for name in index_names(index)]


def index_names(index: Path) -> list[str]:
    """The files that a shard index names, sorted. Raises ``UserError`` if it is damaged or names anything else."""
    where = f"index of weights {index}"
    content = read_json(index, "index of weights")
    shards, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{where}: 'weight_map' must say for every tensor the file that it is in")
    if not isinstance(metadata, dict):
        raise UserError(f"{where}: 'metadata' must be keys and values, which transformers reads")
    names = sorted(set(shards.values()))
    for name in names:
        _check_plain(name, where)
    return names


def is_index(name: object) -> bool:
    """Whether a name is that of an index of shards."""
    return isinstance(name, str) and name.endswith(".safetensors.index.json") and "/" not in name


def _check_plain(name: object, where: str) -> None:
    if not isinstance(name, str) or _SHARD.fullmatch(name) is None:
        raise UserError(f"{where} names {str(name)[:100]!r}, which is not a .safetensors file beside it")


def _checked_file(folder: Path, name: str, where: str) -> Path:
    _check_plain(name, where)
    if not (folder / name).is_file():
        raise UserError(f"{where} names {name}, which is not there: the checkpoint is not complete")
    return folder / name


def _no_weights(folder: Path) -> str:
    pickled = next((name for name in _PICKLED if (folder / name).is_file()), None)
    if pickled is None:
        return f"cannot load model {folder}: it has no weights ({FILE}, or {INDEX} with shards)"
    return (
        f"model {folder} has its weights in {pickled}, a pickle, which can run code when it is read\n"
        "convert it where you trust it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
    )


def stored_names(files: Sequence[Path]) -> set[str]:
    """The names of the tensors in safetensors files, whose headers alone are read."""
    from safetensors import safe_open  # not in the base, which checks checkpoints too

    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            names.update(tensors.keys())
    return names


def content_hashes(files: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of files by name; those of the hub's cache have it for a name, and are not read."""
    named = {file.name: named_hash(file) for file in files}
    rest = [file for file in files if named[file.name] is None]
    found = dict(zip((file.name for file in rest), file_hashes(rest), strict=True))
    return found | {name: value for name, value in named.items() if value is not None}


def carry(files: Sequence[Path], folder: Path, *, link: bool = False) -> str:
    """Give ``folder`` the same files under the same names; says in a word how: "cloned", "copied" or "linked".

    A clone shares the original's place on the disk until one of the two is written to, and takes no time; file systems
    such as Btrfs and XFS have them. Elsewhere the bytes are copied.

    Args:
        link: make hard links, which take no room on any file system. But a link is the same file: a program that
            writes into it changes the original too, so that they are made only where they are asked for.

    Raises:
        UserError: links are asked for where there are none, such as from one file system to another.
        OSError: ``folder`` cannot be written.
    """
    how = "linked" if link else "cloned"
    for file in files:
        original, new = file.resolve(), folder / file.name
        if link:
            try:
                os.link(original, new)
            except OSError as error:
                raise UserError(f"cannot link {original}: {first_line(error)}\nleave --link out") from error
        elif not _clone(original, new):
            shutil.copyfile(original, new)
            how = "copied"
    return how


def _clone(original: Path, new: Path) -> bool:
    """Make ``new`` a clone of a file; False where the file system has none."""
    if sys.platform != "linux":
        return False
    import fcntl

    with suppress(OSError), original.open("rb") as source, new.open("wb") as target:
        fcntl.ioctl(target, _FICLONE, source.fileno())
        return True
    return False
