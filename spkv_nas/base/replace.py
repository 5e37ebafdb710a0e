"""Results of several files: a killed command leaves all of the old ones or all of the new ones.

New files are written to a folder of their own inside the one where they belong. Renaming that folder to ``.commit``
is the one step that decides: before it a killed command has left the old result, after it the new one. What remains is
moving the files to their places; whoever comes next finishes it (``settle``). Who reads while they move may see some of
each, which the hashes of the record beside them tell.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.locks import shared_lock

_NEW, _COMMIT, _STALE, _LOCK = ".new-", ".commit", ".stale.json", ".commit-lock"
_DAY = 86_400.0  # seconds


@contextmanager
def replacing(folder: Path, stale: Iterable[str] = ()) -> Iterator[Path]:
    """A folder to write the files of a result to; when the block ends, they take their places in ``folder`` together.

    Args:
        stale: names of files in ``folder`` that belong to an earlier result and go with it, unless written anew.

    Raises:
        UserError: the folder cannot be written; the earlier result is then untouched.
    """
    with as_user_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=folder))
        new.chmod(0o755)
    try:
        yield new
        with as_user_error(folder):
            written = {file.name for file in new.iterdir()}
            (new / _STALE).write_text(json.dumps(sorted(set(stale) - written)))
            flush(new)
            with shared_lock(folder / _LOCK):
                _settle(folder)
                _tidy(folder)
                new.rename(folder / _COMMIT)
                _settle(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def settle(folder: Path) -> None:
    """Finish what a killed command began: move the files of a result that was decided on to their places.

    Raises:
        UserError: the folder cannot be written.
    """
    if (folder / _COMMIT).is_dir():
        with as_user_error(folder), shared_lock(folder / _LOCK):
            _settle(folder)


def _settle(folder: Path) -> None:
    commit = folder / _COMMIT
    if not commit.is_dir():
        return
    plan = commit / _STALE
    if plan.is_file():  # the last to go, so without it only the empty folder is left
        for name in json.loads(plan.read_text()):
            (folder / Path(name).name).unlink(missing_ok=True)
        for file in sorted(commit.iterdir()):
            if file != plan:
                file.replace(folder / file.name)
        flush(folder, files=False)
        plan.unlink()
    commit.rmdir()


def _tidy(folder: Path) -> None:
    """Remove what commands that were killed before they decided left a day ago or longer."""
    for left in folder.glob(f"{_NEW}*"):
        with suppress(OSError):  # another process may remove its own
            if time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left, ignore_errors=True)


def check_new(folder: Path) -> Path:
    """Resolve a folder that ``new_folder`` may write. Raises ``UserError``: it holds files, or the process is in it."""
    target = folder.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: choose another --out")
    if target == Path.cwd():  # which is replaced, so that whoever is in it would be nowhere
        raise UserError(f"{folder} is the current folder: choose a new one with --out")
    return target


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``final`` in one step when the block ends; without an error, that is.

    What was at ``final`` goes just before. One process at a time may make a ``final`` (``base.locks``).

    Raises:
        UserError: the place cannot be written.
    """
    partial = final.with_name(f".{final.name}.partial")
    with as_user_error(final):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        yield partial
        with as_user_error(final):
            flush(partial)
            if final.is_symlink():
                final.unlink()
            elif final.is_dir():
                shutil.rmtree(final)
            partial.rename(final)
            flush(final.parent, files=False)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def flush(folder: Path, *, files: bool = True) -> None:
    """Have the operating system write a folder to disk, with the files below it."""
    for path in (*(folder.rglob("*") if files else ()), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):  # of folders on some networks
                raise
        finally:
            os.close(descriptor)


@contextmanager
def as_user_error(folder: Path) -> Iterator[None]:
    """Errors of the operating system while ``folder`` is written become a ``UserError`` that says what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {folder}: {first_line(error)}\nmake room, or choose a writable folder with --workspace"
        ) from error
