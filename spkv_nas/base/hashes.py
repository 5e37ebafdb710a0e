"""Cached SHA-256 of large files: hashing gigabytes takes as long as reading them, and every command needs the hashes.

Hashes are cached per user, in the system's cache folder (``XDG_CACHE_HOME``), keyed by device and inode and valid for
one size and set of timestamps, which every write changes. Damage without a write, such as bit rot on a disk, is
therefore detected only when a file is first read or copied.
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

_LARGE = 64 << 20  # bytes; smaller files are read within a tenth of a second
_SETTLED = 2.0  # seconds since a change, after which another change surely has another timestamp
_MAX_THREADS = 8
_HEX = re.compile("[0-9a-f]{64}")


def file_hash(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes; concurrent processes read the file only once."""
    status = path.stat()
    # Do not cache hashes of small files, or of fresh ones, whose status may not show the next change
    if status.st_size < _LARGE or time.time() - max(status.st_mtime, status.st_ctime) < _SETTLED:
        return sha256_file(path)
    # Share the hash of a large file between processes
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spkv-nas" / "hashes"
    cache_file = folder / f"{status.st_dev}-{status.st_ino}.json"
    with suppress(UserError, OSError, NotImplementedError):  # no folder for a cache, or no locks in it
        folder.mkdir(parents=True, exist_ok=True)
        with shared_lock(cache_file.with_suffix(".lock")):
            return _read_cached_hash(cache_file, status) or _compute_and_cache(cache_file, path, status)
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


def _file_state(status: os.stat_result) -> dict[str, Any]:
    """Return the size and timestamps for which a cached hash is valid."""
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def _read_cached_hash(cache_file: Path, status: os.stat_result) -> str | None:
    """Return the cached hash, or None if there is none for a file in this state."""
    with suppress(UserError):
        content = read_json(cache_file, "hash")
        digest = content.pop("sha256", None)
        if content == _file_state(status) and isinstance(digest, str) and _HEX.fullmatch(digest):
            return digest
    return None


def _compute_and_cache(cache_file: Path, path: Path, status: os.stat_result) -> str:
    """Hash the file and cache the result, unless the file changed meanwhile."""
    digest = sha256_file(path)
    if _file_state(path.stat()) == _file_state(status):
        with suppress(UserError):
            write_json(cache_file, {**_file_state(status), "sha256": digest})
    return digest
