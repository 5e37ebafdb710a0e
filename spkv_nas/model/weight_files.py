"""Find and check a model's weight files, and carry them over to another folder.

A shard index may name files anywhere, which is refused here. Unchanged weights are carried over as files: no tensor is
read, and the shards stay the same.
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
_FICLONE = 0x40049409  # <linux/fs.h>


def check_files(folder: Path, explicit: str | None = None) -> list[Path]:
    """Return the weight files of a model folder after checking them; symbolic links, as in the hub cache, count.

    Args:
        folder: model folder.
        explicit: weight file or index that the config names instead of the usual ones.

    Raises:
        UserError: there are no safetensors files, or the index of shards is damaged or names anything but files of the
            folder.
    """
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"model {folder} is a LoRA adapter: merge it into its base model and give the folder of the result"
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
    """Return the sorted files of a shard index. Raises ``UserError`` if it is damaged or names anything else."""
    source = f"index of weights {index}"
    content = read_json(index, "index of weights")
    shards, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{source}: 'weight_map' must map every tensor to its file")
    if not isinstance(metadata, dict):
        raise UserError(f"{source}: 'metadata' must be a mapping of keys to values")
    names = sorted(set(shards.values()))
    for name in names:
        _check_plain(name, source)
    return names


def is_index(name: object) -> bool:
    """Return whether a file name is that of a shard index."""
    return isinstance(name, str) and name.endswith(".safetensors.index.json") and "/" not in name


def _check_plain(name: object, source: str) -> None:
    """Raise ``UserError`` unless a name is that of a safetensors file without a folder."""
    if not isinstance(name, str) or _SHARD.fullmatch(name) is None:
        raise UserError(f"{source} names {str(name)[:100]!r}, which is not a .safetensors file in the same folder")


def _checked_file(folder: Path, name: str, source: str) -> Path:
    """Return the path of a weight file in ``folder``. Raises ``UserError`` if it is missing or not allowed."""
    _check_plain(name, source)
    if not (folder / name).is_file():
        raise UserError(f"{source} names {name}, which does not exist: the checkpoint is incomplete")
    return folder / name


def _no_weights(folder: Path) -> str:
    """Build the error message for a folder without safetensors files."""
    pickled = next((name for name in _PICKLED if (folder / name).is_file()), None)
    if pickled is None:
        return f"cannot load model {folder}: it has no weights ({FILE}, or {INDEX} with shards)"
    return (
        f"model {folder} has its weights in {pickled}, a pickle, which can run code when it is read\n"
        "convert it where you trust it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
    )


def stored_names(files: Sequence[Path]) -> set[str]:
    """Return the names of the tensors in safetensors files, reading only the headers."""
    from safetensors import safe_open  # an extra; the base install checks checkpoints too

    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            names.update(tensors.keys())
    return names


def content_hashes(files: Sequence[Path]) -> dict[str, str]:
    """Compute the SHA-256 of files by name; files of the hub cache are named by it and not read."""
    hash_in_name = {file.name: named_hash(file) for file in files}
    unnamed = [file for file in files if hash_in_name[file.name] is None]
    computed = dict(zip((file.name for file in unnamed), file_hashes(unnamed), strict=True))
    return computed | {name: value for name, value in hash_in_name.items() if value is not None}


def carry(files: Sequence[Path], folder: Path, *, link: bool = False) -> str:
    """Clone, copy or link files to ``folder`` under the same names, and return "cloned", "copied" or "linked".

    A clone shares disk space with the original until either is written to, and takes no time; file systems such as
    Btrfs and XFS support it. Elsewhere files are copied.

    Args:
        files: files to carry over.
        folder: target folder.
        link: make hard links, which use no disk space on any file system. A program that writes to a link changes the
            original too, so they are made only on request.

    Raises:
        UserError: links are impossible, such as from one file system to another.
        OSError: ``folder`` cannot be written.
    """
    method = "linked" if link else "cloned"
    for file in files:
        original, target = file.resolve(), folder / file.name
        if link:
            try:
                os.link(original, target)
            except OSError as error:
                raise UserError(f"cannot link {original}: {first_line(error)}\nleave --link out") from error
        elif not _clone(original, target):
            shutil.copyfile(original, target)
            method = "copied"
    return method


def _clone(original: Path, destination: Path) -> bool:
    """Clone a file to ``destination``; return False where the file system does not support it."""
    if sys.platform != "linux":
        return False
    import fcntl

    with suppress(OSError), original.open("rb") as source, destination.open("wb") as target:
        fcntl.ioctl(target, _FICLONE, source.fileno())
        return True
    return False
