"""Atomic replacement of results of several files: an interrupted command leaves all old files or all new ones.

New files are written to a temporary folder inside the target folder. Renaming it to ``.commit`` is the decisive step:
an interruption before it leaves the old result, one after it the new result. Then the files are moved to the target;
if that is interrupted, the next reader completes it (``settle``). A reader during the move may see a mixture, which the
hashes in the record reveal.
"""

import errno
import glob
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from spkv_nas.base import errors, locks
from spkv_nas.base.files import as_user_error

_NEW = ".new-"
_COMMIT = ".commit"
_STALE = ".stale.json"
_LOCK = ".commit-lock"
_PARTIAL = ".partial-"  # after the name of the folder that a temporary one becomes
_DAY = 86_400.0  # seconds


@contextmanager
def replacing(folder: Path, stale: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder whose files replace those in ``folder`` together when the block ends.

    ``stale`` names files of an earlier result to delete, unless they are written again. Raises ``UserError`` if the
    folder cannot be written; the earlier result is then unchanged.
    """
    # Create the temporary folder
    with as_user_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        new_files = folder / f"{_NEW}{secrets.token_hex(4)}"
        new_files.mkdir()  # its mode follows the umask, unlike that of ``tempfile``
    try:
        yield new_files
        with as_user_error(folder):
            # Record the stale files, and flush everything to disk
            written_names = {file.name for file in new_files.iterdir()}
            (new_files / _STALE).write_text(json.dumps(sorted(set(stale) - written_names)))
            flush(new_files)
            with locks.shared_lock(folder / _LOCK):
                # Complete an interrupted replacement before committing this one
                _settle(folder)
                # Remove temporary folders of interrupted commands that are more than a day old
                for leftover in folder.glob(f"{_NEW}*"):
                    with suppress(OSError):  # another process may remove it meanwhile
                        if time.time() - leftover.stat().st_mtime > _DAY:
                            shutil.rmtree(leftover, ignore_errors=True)
                new_files.rename(folder / _COMMIT)
                _settle(folder)
    finally:
        shutil.rmtree(new_files, ignore_errors=True)


def settle(folder: Path) -> None:
    """Complete an interrupted replacement: move the files of a committed result to their target."""
    if (folder / _COMMIT).is_dir():
        with as_user_error(folder), locks.shared_lock(folder / _LOCK):
            _settle(folder)


def _settle(folder: Path) -> None:
    """Move committed files to their target; the caller holds the lock."""
    commit = folder / _COMMIT
    if not commit.is_dir():
        return
    plan = commit / _STALE
    if plan.is_file():  # deleted last: without it only the empty folder remains
        # Delete stale files, then move the new ones
        for name in json.loads(plan.read_text()):
            (folder / Path(name).name).unlink(missing_ok=True)
        for file in sorted(commit.iterdir()):
            if file != plan:
                file.replace(folder / file.name)
        flush(folder, files=False)
        plan.unlink()
    commit.rmdir()


def check_new(folder: Path) -> Path:
    """Resolve a folder that ``new_folder`` may write.

    Raises ``UserError``: it is the current folder, has files, or cannot be made where it would be.
    """
    target = folder.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise errors.UserError(f"{folder} exists and is not an empty folder: choose another --out")
    if target == Path.cwd():  # replacing it would leave the shell in a deleted folder
        raise errors.UserError(f"{folder} is the current folder: choose a new one with --out")
    # Try to write in the folder that is there, before hours of work end in one that is missing
    parent = next(parent for parent in target.parents if parent.exists())
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise errors.UserError(
            f"{folder} cannot be written, because of {parent}: "
            f"{error.strerror or error}\nchoose another --out"
        ) from error
    return target


@contextmanager
def new_folder(final: Path, *, replaces: bool = True) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``final`` when the block ends without an error.

    Several processes may write one ``final``: each has a temporary folder of its own, and the last replaces the others.
    Unless this one ``replaces`` them, ``UserError`` if another has files in ``final`` by then.
    """
    partial = final.with_name(f".{final.name}{_PARTIAL}{secrets.token_hex(4)}")
    lock = locks.shared_lock(_lock_of(partial))
    with as_user_error(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final)
        lock.acquire()
    try:
        with as_user_error(final):
            partial.mkdir()
        yield partial
        with as_user_error(final):
            # Replace the earlier folder once all files are on disk
            flush(partial)
            if replaces and final.is_symlink():
                final.unlink()
            elif replaces and final.is_dir():
                shutil.rmtree(final)
            _rename(partial, final)
            flush(final.parent, files=False)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()
        with suppress(OSError):
            _lock_of(partial).unlink()


def _rename(partial: Path, final: Path) -> None:
    """Rename a folder to another, which may be there without files. Raises ``UserError`` if that has files."""
    try:
        partial.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise errors.UserError(
            f"{final} was written by another process in the meantime, "
            "and is left as it is: choose another --out"
        ) from error


def _lock_of(partial: Path) -> Path:
    """Return the file whose lock the process that writes a temporary folder holds."""
    return partial.with_name(f"{partial.name}.lock")


def _remove_leftovers(final: Path) -> None:
    """Remove the temporary folders of ``final`` whose processes have ended without removing them."""
    for file in final.parent.glob(f".{glob.escape(final.name)}{_PARTIAL}*.lock"):
        lock = locks.shared_lock(file)
        with suppress(OSError, Timeout):  # the process goes on, or another one removes its folder
            lock.acquire(timeout=0.0)
            shutil.rmtree(file.with_suffix(""), ignore_errors=True)
            file.unlink()
        lock.release()


def flush(folder: Path, *, files: bool = True) -> None:
    """Flush a folder to disk (fsync), with the files below it unless ``files`` is False."""
    for path in (*(folder.rglob("*") if files else ()), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:  # some network file systems do not sync folders
            if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)
