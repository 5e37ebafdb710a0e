"""SHA-256 of files, computed once: that of gigabytes takes as long as to read them, and every command asks for it.

What was computed is kept by user, in the cache folder of the system (``XDG_CACHE_HOME``), for the file of that number
(inode), size and times; whatever writes to a file changes the last. Damage that the system does not know of, such as
bits of a disk that flip, is therefore found when a file is read for the first time, or is copied, and not again.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_json, sha256_file, write_json
from spkv_nas.base.locks import shared_lock

_LARGE = 64 << 20  # bytes; a smaller file is read within a tenth of a second
_SETTLED = 2.0  # seconds since a file was changed, after which another change is sure to have another time
_MOST_THREADS = 8
_HEX = re.compile("[0-9a-f]{64}")


def file_hash(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes, as they were when they were read; processes that ask together read once.

    Raises:
        OSError: the file cannot be read.
    """
    found = path.stat()
    if found.st_size < _LARGE or time.time() - max(found.st_mtime, found.st_ctime) < _SETTLED:
        return sha256_file(path)
    note = _folder() / f"{found.st_dev}-{found.st_ino}.json"
    with suppress(UserError, OSError, NotImplementedError):  # no place for a cache, or no locks there
        note.parent.mkdir(parents=True, exist_ok=True)
        with shared_lock(note.with_suffix(".lock")):
            return _noted(note, found) or _note(note, path, found)
    return sha256_file(path)


def file_hashes(paths: Iterable[Path]) -> list[str]:
    """``file_hash`` of each, several at a time."""
    with hashing(paths) as wait:
        return wait()


@contextmanager
def hashing(paths: Iterable[Path]) -> Iterator[Callable[[], list[str]]]:
    """``file_hashes`` while the block runs, which is given a function that waits for them."""
    pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
    try:
        futures = [pool.submit(file_hash, path) for path in paths]
        yield lambda: [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def named_hash(path: Path) -> str | None:
    """The SHA-256 that a file of the hub's cache has for a name, if it is one; nothing is read."""
    target = path.resolve() if path.is_symlink() else path
    return target.name if target.parent.name == "blobs" and _HEX.fullmatch(target.name) else None


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spkv-nas" / "hashes"


def _times(found: os.stat_result) -> dict[str, Any]:
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}


def _noted(note: Path, found: os.stat_result) -> str | None:
    """The hash that a note has of the file that was found so; None where it has none."""
    try:
        content = read_json(note, "hash")
    except UserError:
        return None
    digest = content.pop("sha256", None)
    return digest if content == _times(found) and isinstance(digest, str) and _HEX.fullmatch(digest) else None


def _note(note: Path, path: Path, found: os.stat_result) -> str:
    """Read the file and note its hash, unless it was changed meanwhile."""
    digest = sha256_file(path)
    if _times(path.stat()) == _times(found):
        with suppress(UserError):
            write_json(note, {**_times(found), "sha256": digest})
    return digest
