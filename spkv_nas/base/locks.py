"""Locks between processes that work in one folder: the second waits, and says for whom.

The operating system frees a lock when its process ends, however it ends, where the file system has locks.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.progress import Announce, silent

_LOCK, _OWNER = ".lock", ".lock-owner"


def shared_lock(file: Path) -> FileLock:
    """A lock that every user may take who may write its folder."""
    return FileLock(file, mode=0o666)


class FolderLock:
    """The lock of a folder, which is made if need be.

    Args:
        what: says what the holder does ("trains ..."), to those who wait.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self._folder, self._what = folder, what
        self._lock = shared_lock(folder / _LOCK)
        self._has_waited = False

    def take(self, seconds: float, announce: Announce = silent) -> bool:
        """Try to get it for so long (below 0: until it is free); ``announce`` is told once for whom this waits.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._get(0.0):
                if not self._has_waited:
                    announce(f"waiting for {_owner(self._folder)}, which {self._what}")
                self._has_waited = True
                if not self._get(seconds):
                    return False
        except (OSError, NotImplementedError) as error:  # the latter where a file system has no locks
            raise UserError(
                f"cannot lock {self._folder}: {first_line(error)}\nchoose a writable folder with --workspace"
            ) from error
        with suppress(OSError):  # a note that names this process; the lock holds without it
            note = json.dumps({"process": os.getpid(), "host": socket.gethostname()})
            (self._folder / _OWNER).write_text(note)
        return True

    def free(self) -> None:
        """Give it back, if this process has it."""
        if self._lock.is_locked:
            with suppress(OSError):
                (self._folder / _OWNER).unlink()
            self._lock.release()

    def _get(self, seconds: float) -> bool:
        try:
            self._lock.acquire(timeout=seconds)
        except Timeout:
            return False
        return True


@contextmanager
def locked(folder: Path, what: str, announce: Announce = silent) -> Iterator[None]:
    """Hold ``folder`` for this process while the block runs; see ``FolderLock``."""
    lock = FolderLock(folder, what)
    lock.take(-1.0, announce)
    try:
        yield
    finally:
        lock.free()


def is_held(folder: Path) -> bool:
    """Whether somebody says to hold a folder, who is there still or on another machine; takes no lock."""
    try:
        note = json.loads((folder / _OWNER).read_text())
        return bool(note["host"] != socket.gethostname()) or psutil.pid_exists(int(note["process"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _owner(folder: Path) -> str:
    try:
        note = json.loads((folder / _OWNER).read_text())
        return f"process {int(note['process'])} on {str(note['host'])[:64]}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
