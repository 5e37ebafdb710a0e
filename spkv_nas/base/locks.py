"""Folder locks between processes: the second waits and names the first. The system frees those of dead ones."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from spkv_nas.base import errors, progress

_LOCK = ".lock"
_OWNER = ".lock-owner"


def shared_lock(file: Path) -> FileLock:
    """Return a file lock that every user with write access to the folder can acquire."""
    return FileLock(file, mode=0o666)


class FolderLock:
    """Exclusive lock of a folder, created if missing; ``what`` says what its holder does ("trains ...")."""

    def __init__(self, folder: Path, what: str) -> None:
        """Store the arguments without acquiring the lock."""
        self._folder = folder
        self._what = what
        self._lock = shared_lock(folder / _LOCK)
        self._has_waited = False

    def take(self, seconds: float, announce: progress.Announce = progress.silent) -> bool:
        """Try to acquire the lock for some seconds, or if negative until it is free; return whether it was acquired.

        If this process has to wait, ``announce`` is called once with the holder. Raises ``UserError`` if the folder
        cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Announce the wait once, then wait for the lock
            try:
                self._lock.acquire(timeout=0.0)
            except Timeout:
                if not self._has_waited:
                    announce(f"waiting for {_owner(self._folder)}, which {self._what}")
                self._has_waited = True
                self._lock.acquire(timeout=seconds)
        except Timeout:
            return False
        # The latter if the file system has no locks
        except (OSError, NotImplementedError) as error:
            raise errors.UserError(
                f"cannot lock {self._folder}: {errors.first_line(error)}\n"
                "choose a writable folder with --workspace"
            ) from error
        # Record this process as the holder; the lock works without that
        with suppress(OSError):
            owner = json.dumps({"process": os.getpid(), "host": socket.gethostname()})
            (self._folder / _OWNER).write_text(owner)
        return True

    def free(self) -> None:
        """Release the lock, if this process holds it."""
        if self._lock.is_locked:
            with suppress(OSError):
                (self._folder / _OWNER).unlink()
            self._lock.release()


@contextmanager
def locked(
    folder: Path, what: str, announce: progress.Announce = progress.silent
) -> Iterator[None]:
    """Hold the lock of ``folder`` while the block runs; see ``FolderLock``."""
    lock = FolderLock(folder, what)
    lock.take(-1.0, announce)
    try:
        yield
    finally:
        lock.free()


def _owner(folder: Path) -> str:
    """Describe the process that holds the lock of a folder."""
    try:
        owner = json.loads((folder / _OWNER).read_text())
        return f"process {int(owner['process'])} on {str(owner['host'])[:64]}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
