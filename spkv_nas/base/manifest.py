"""The manifest of a folder: the SHA-256 of every file, written last, so that it also marks the folder as complete.

safetensors carries no checksum, so a flipped bit would load silently: every checkpoint that this package writes, and
every tokenizer, has one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import read_json, write_json
from spkv_nas.base.hashes import file_hashes, hashing

MANIFEST = "spkv-manifest.json"
WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json")  # how the names of files with weights end

_REMEDY = "remove the folder and run the command again that made it, or copy it anew"


def write_manifest(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Record the SHA-256 of every file of ``folder``; the last file to be written, so it marks completeness.

    Hidden files are left out, such as what a kill left of an earlier manifest.

    Args:
        known: hashes by name of files that were copied, those of their originals; the others are read.
    """
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST and not p.name.startswith("."))
    hashes = dict.fromkeys((p.relative_to(folder).as_posix() for p in files), "") | dict(known or {})
    read = [name for name, value in hashes.items() if not value]
    try:
        hashes |= zip(read, file_hashes(folder / name for name in read), strict=True)
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
    with manifest_checked(folder, names, what=what):
        pass


@contextmanager
def manifest_checked(folder: Path, names: Collection[str] | None = None, *, what: str = "checkpoint") -> Iterator[None]:
    """``check_manifest`` while the block reads the files; damage is a better reason than what the block says of it."""
    hashes = read_manifest(folder, what) if (folder / MANIFEST).exists() else {}
    added = sorted(p.name for p in folder.iterdir() if _is_read(p.name) and p.name not in hashes) if hashes else []
    if added:
        raise UserError(f"{what} {folder}: {added[0]} is not in its {MANIFEST}, so it was added\n{_REMEDY}")
    expected = {name: value for name, value in hashes.items() if names is None or name in names}
    missing = [name for name in expected if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{what} {folder} is damaged: {missing[0]} is missing\n{_REMEDY}")
    with hashing(folder / name for name in expected) as wait:
        try:
            yield
        except Exception:
            _compare(folder, expected, wait, what)
            raise
        _compare(folder, expected, wait, what)


def _compare(folder: Path, expected: Mapping[str, str], wait: Callable[[], list[str]], what: str) -> None:
    try:
        found = wait()
    except OSError as error:
        raise UserError(f"{what} {folder}: cannot read a file of it: {first_line(error)}") from error
    for name, value in zip(expected, found, strict=True):
        if value != expected[name]:
            raise UserError(f"{what} {folder} is damaged: {name} differs from its recorded SHA-256\n{_REMEDY}")


def _is_read(name: str) -> bool:
    """Whether the name is that of a file from which a model or its tokenizer is made."""
    return name.endswith(WEIGHT_ENDINGS) or (
        name.endswith(".json") and name.startswith(("config", "generation", "token"))
    )


def is_complete(folder: Path, needed: Iterable[str] = ()) -> bool:
    """Whether ``folder`` holds a checkpoint that was written to the end, ``needed`` files too; takes no hashes."""
    return (folder / MANIFEST).is_file() and all((folder / name).is_file() for name in needed)
