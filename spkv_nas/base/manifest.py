"""The manifest of a folder: the SHA-256 of every file, written last, so that it also marks the folder as complete.

safetensors carries no checksum, so a flipped bit would load silently: every checkpoint that this package writes, and
every tokenizer, has one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import read_json, sha256_file, write_json

MANIFEST = "spkv-manifest.json"
WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json")  # how the names of files with weights end

_REMEDY = "remove the folder and run the command again that made it, or copy it anew"


def write_manifest(folder: Path) -> None:
    """Record the SHA-256 of every file of ``folder``; the last file to be written, so it marks completeness.

    Hidden files are left out, such as what a kill left of an earlier manifest.
    """
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST and not p.name.startswith("."))
    try:
        hashes = {p.relative_to(folder).as_posix(): sha256_file(p) for p in files}
    except OSError as error:
        raise UserError(f"cannot read checkpoint {folder} back: {first_line(error)}") from error
    write_json(folder / MANIFEST, {"sha256": hashes})


def read_manifest(folder: Path, what: str = "checkpoint") -> dict[str, str]:
    """SHA-256 of the files of ``folder``, a ``what`` in errors, by their names in it, which are all below it.

    Raises:
        UserError: there is no manifest, or it is damaged.
    """
    where = f"{what} {folder} is damaged: {MANIFEST}"
    try:
        hashes = read_json(folder / MANIFEST, "manifest").get("sha256")
    except UserError as error:
        raise UserError(f"{where} cannot be read: {error}") from error
    if not isinstance(hashes, dict) or not hashes:
        raise UserError(f"{where} lists no files under 'sha256'")
    for name, expected in hashes.items():
        if not isinstance(expected, str) or re.fullmatch("[0-9a-f]{64}", expected) is None:
            raise UserError(f"{where} has no SHA-256 for {name[:100]!r}")
        if not name.isprintable() or "\\" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise UserError(f"{where} names {name[:100]!r}, which is not a file below it")
    return hashes


def check_manifest(folder: Path, names: Collection[str] | None = None, *, what: str = "checkpoint") -> None:
    """Raise ``UserError`` if a file of ``folder`` is missing or differs from its manifest. No manifest: no check.

    Files that were added are nobody's business, unless loading would read them. ``names``: only of these files;
    ``what`` the folder is begins the error.
    """
    if not (folder / MANIFEST).exists():
        return
    hashes = read_manifest(folder, what)
    added = sorted(p.name for p in folder.iterdir() if _is_read(p.name) and p.name not in hashes)
    if added:
        raise UserError(f"{what} {folder}: {added[0]} is not in its {MANIFEST}, so it was added\n{_REMEDY}")
    for name, expected in hashes.items():
        if names is not None and name not in names:
            continue
        file = folder / name
        if not file.is_file():
            raise UserError(f"{what} {folder} is damaged: {name} is missing\n{_REMEDY}")
        try:
            found = sha256_file(file)
        except OSError as error:
            raise UserError(f"{what} {folder}: cannot read {name}: {first_line(error)}") from error
        if found != expected:
            raise UserError(f"{what} {folder} is damaged: {name} differs from its recorded SHA-256\n{_REMEDY}")


def _is_read(name: str) -> bool:
    """Whether the name is that of a file from which a model or its tokenizer is made."""
    return name.endswith(WEIGHT_ENDINGS) or (
        name.endswith(".json") and name.startswith(("config", "generation", "token"))
    )


def is_complete(folder: Path, needed: Iterable[str] = ()) -> bool:
    """Whether ``folder`` holds a checkpoint that was written to the end, ``needed`` files too; takes no hashes."""
    return (folder / MANIFEST).is_file() and all((folder / name).is_file() for name in needed)
