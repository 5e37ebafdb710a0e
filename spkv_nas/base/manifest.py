"""Manifest of a folder: the SHA-256 of every file. It is written last, so it also marks the folder as complete.

safetensors has no checksum, so a flipped bit would load silently. Every checkpoint and tokenizer that this package
writes therefore has a manifest.

Hashing gigabytes takes as long as reading them, and every command needs the hashes, so those of large files are cached
per user, in the system's cache folder (``XDG_CACHE_HOME``), keyed by device and inode and valid for one size and set of
timestamps, which every write changes. Damage without a write, such as bit rot on a disk, is therefore detected only
when a file is first read or copied.
"""

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import read_json, sha256_file, write_json
from spkv_nas.base.locks import shared_lock

MANIFEST = "spkv-manifest.json"
_ORIGIN = "origin"  # key of what a folder was made from, beside the hashes
WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json")  # endings of weight files

_REMEDY = "remove the folder and run the command that wrote it again, or copy it again"
_LARGE = 64 << 20  # bytes; smaller files are read within a tenth of a second
_SETTLED = 2.0  # seconds since a change, after which another change surely has another timestamp
_MAX_THREADS = 8
_HEX = re.compile("[0-9a-f]{64}")


def write_manifest(
    folder: Path,
    known_hashes: Mapping[str, str] | None = None,
    *,
    origin: Mapping[str, str | None] | None = None,
) -> None:
    """Record the SHA-256 of every file of ``folder``; written last, it marks the folder as complete.

    Hidden files, such as remains of an interrupted write, are left out. Files named in ``known_hashes`` are copies,
    whose hashes were computed on the originals; the others are read. ``origin`` says what the folder was made from.
    """
    hashes = dict.fromkeys(_file_names(folder), "") | dict(known_hashes or {})
    unhashed = [name for name, value in hashes.items() if not value]
    try:
        hashes |= zip(unhashed, file_hashes(folder / name for name in unhashed), strict=True)
    except OSError as error:
        raise UserError(f"cannot read checkpoint {folder} back: {first_line(error)}") from error
    content: dict[str, object] = {"sha256": hashes}
    if origin is not None:
        content[_ORIGIN] = dict(origin)
    write_json(folder / MANIFEST, content)


def _file_names(folder: Path) -> list[str]:
    """Return the files of a folder that a manifest lists, relative to it."""
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST and not path.name.startswith("."):
            files.append(path.relative_to(folder).as_posix())
    return files


def read_origin(folder: Path) -> Any:
    """Return what the manifest of ``folder`` says that it was made from; None if it does not say, or is missing."""
    file = folder / MANIFEST
    return read_json(file, "manifest").get(_ORIGIN) if file.is_file() else None


def read_manifest(folder: Path, what: str = "checkpoint") -> dict[str, str]:
    """Read the SHA-256 of the files of ``folder``, by relative name; ``what`` names the kind of folder in errors."""
    where = f"{what} {folder} is damaged: {MANIFEST}"
    try:
        hashes = read_json(folder / MANIFEST, "manifest").get("sha256")
    except UserError as error:
        raise UserError(f"{where} cannot be read: {error}") from error
    if not isinstance(hashes, dict) or not hashes:
        raise UserError(f"{where} lists no files under 'sha256'")
    # Check the hashes, and that no name leads out of the folder
    for name, expected in hashes.items():
        if not isinstance(expected, str) or _HEX.fullmatch(expected) is None:
            raise UserError(f"{where} has no SHA-256 for {name[:100]!r}")
        leads_out = "\\" in name or not {"", ".", ".."}.isdisjoint(name.split("/"))
        if leads_out or not name.isprintable():
            raise UserError(f"{where} names {name[:100]!r}, which is not a file below it")
    return hashes


def check_manifest(
    folder: Path, names: Collection[str] | None = None, *, what: str = "checkpoint"
) -> None:
    """Check files of ``folder`` (those with ``names``, or all, and added ones that loading reads) by its manifest."""
    with manifest_checked(folder, names, what=what):
        pass


@contextmanager
def manifest_checked(
    folder: Path, names: Collection[str] | None = None, *, what: str = "checkpoint"
) -> Iterator[None]:
    """Check the manifest in the background while the block reads the files; damage replaces the block's error."""
    hashes = {}
    if (folder / MANIFEST).exists():
        hashes = read_manifest(folder, what)
        _refuse_added(folder, hashes, what)
    expected = {name: value for name, value in hashes.items() if names is None or name in names}
    missing = [name for name in expected if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{what} {folder} is damaged: {missing[0]} is missing\n{_REMEDY}")
    # Hash in the background; damaged files explain an error of the block better than the error itself
    with hashing(folder / name for name in expected) as wait:
        try:
            yield
        except Exception:
            _compare(folder, expected, wait, what)
            raise
        _compare(folder, expected, wait, what)


def _refuse_added(folder: Path, hashes: Collection[str], what: str) -> None:
    """Raise ``UserError`` if a folder has a file that loading reads, and that its manifest does not list."""
    for name in sorted(path.name for path in folder.iterdir()):
        if _is_read(name) and name not in hashes:
            raise UserError(
                f"{what} {folder}: {name} is not listed in its {MANIFEST}: "
                f"it was added later\n{_REMEDY}"
            )


def _compare(
    folder: Path, expected: Mapping[str, str], wait: Callable[[], list[str]], what: str
) -> None:
    """Wait for the hashes and compare them with the manifest; raise ``UserError`` if one differs."""
    try:
        computed_hashes = wait()
    except OSError as error:
        raise UserError(
            f"{what} {folder}: cannot read a file of it: {first_line(error)}"
        ) from error
    for name, value in zip(expected, computed_hashes, strict=True):
        if value != expected[name]:
            raise UserError(
                f"{what} {folder} is damaged: {name} differs from its recorded SHA-256\n{_REMEDY}"
            )


def _is_read(name: str) -> bool:
    """Return whether loading a model or its tokenizer reads a file of this name."""
    is_setting = name.endswith(".json") and name.startswith(("config", "generation", "token"))
    return is_setting or name.endswith(WEIGHT_ENDINGS)


def is_complete(folder: Path, needed: Iterable[str] = ()) -> bool:
    """Return whether ``folder`` has a manifest and the files ``needed``; computes no hashes."""
    return (folder / MANIFEST).is_file() and all((folder / name).is_file() for name in needed)


def file_hash(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes; concurrent processes read the file only once."""
    status = path.stat()
    # Do not cache hashes of small files, or of fresh ones, whose status may not show the next change
    if status.st_size < _LARGE or time.time() - max(status.st_mtime, status.st_ctime) < _SETTLED:
        return sha256_file(path)
    # Share the hash of a large file between processes
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "spkv-nas" / "hashes"
    cache_file = folder / f"{status.st_dev}-{status.st_ino}.json"
    # There may be no folder for a cache, or no locks in it
    with suppress(UserError, OSError, NotImplementedError):
        folder.mkdir(parents=True, exist_ok=True)
        with shared_lock(cache_file.with_suffix(".lock")):
            return _cached_hash(cache_file, path, status)
    return sha256_file(path)


def file_hashes(paths: Iterable[Path]) -> list[str]:
    """Return the ``file_hash`` of each file, computed in parallel."""
    with hashing(paths) as wait:
        return wait()


@contextmanager
def hashing(paths: Iterable[Path]) -> Iterator[Callable[[], list[str]]]:
    """Compute ``file_hashes`` in the background; yield a function that waits for and returns them."""
    pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
    try:
        futures = [pool.submit(file_hash, path) for path in paths]
        yield lambda: [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def named_hash(path: Path) -> str | None:
    """Return the SHA-256 that names a blob in the Hugging Face cache, without reading it; None for other files."""
    target = path.resolve() if path.is_symlink() else path
    return target.name if target.parent.name == "blobs" and _HEX.fullmatch(target.name) else None


def _file_state(status: os.stat_result) -> dict[str, object]:
    """Return the size and timestamps for which a cached hash is valid."""
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def _cached_hash(cache_file: Path, path: Path, status: os.stat_result) -> str:
    """Return the cached hash of a file in this state; else hash it and cache that, unless it changed meanwhile."""
    with suppress(UserError):
        content = read_json(cache_file, "hash")
        digest = content.pop("sha256", None)
        if content == _file_state(status) and isinstance(digest, str) and _HEX.fullmatch(digest):
            return digest
    digest = sha256_file(path)
    if _file_state(path.stat()) == _file_state(status):
        with suppress(UserError):
            write_json(cache_file, {**_file_state(status), "sha256": digest})
    return digest
