"""Open the database of a search's studies, and lock it so that workers take turns.

SQLite is a file in the search's folder, next to its lock file. Workers on machines whose file system lacks reliable
locks share a PostgreSQL server and its advisory locks. Either lock is released when its holder's process or connection
ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from optuna.exceptions import OptunaError
from optuna.storages import RDBStorage
from sqlalchemy import Engine, create_engine, func, make_url, select
from sqlalchemy.exc import ArgumentError, DatabaseError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.extras import missing_extra
from spkv_nas.base.locks import shared_lock

IF_DAMAGED = "if its file is damaged, remove it: scores and retrained checkpoints are kept in other files"
_SERVER = "postgresql"
_TURN = 5353118  # key of the server's advisory lock
_OPTIONS = {
    "sqlite": {"connect_args": {"timeout": 60}},
    _SERVER: {"pool_pre_ping": True},  # reconnect if the server was restarted
}


class Storage:
    """Optuna's studies in a database, whose tables are created if missing.

    Args:
        url: SQLAlchemy URL of an SQLite file or a PostgreSQL database.
        lock: path of the lock file, unused with PostgreSQL.

    Raises:
        UserError: the URL cannot be opened.
    """

    def __init__(self, url: str, lock: Path) -> None:
        """Open the database and create its tables."""
        try:
            engine = create_engine(url, poolclass=NullPool)
            self._lock = shared_lock(lock)
            lock.parent.mkdir(parents=True, exist_ok=True)
            with self._turn(engine):  # two processes cannot create the tables at once
                self.studies = RDBStorage(url, engine_kwargs=_OPTIONS.get(engine.dialect.name, {}))
        except (SQLAlchemyError, ImportError, ValueError, RuntimeError, OSError) as error:
            raise _cannot_open(url, error) from error

    def turn(self) -> AbstractContextManager[None]:
        """Hold the lock: one worker at a time is inside the block, others wait."""
        return self._turn(self.studies.engine)

    @contextmanager
    def _turn(self, engine: Engine) -> Iterator[None]:
        """Hold the server's advisory lock, or the lock file."""
        if engine.dialect.name == _SERVER:
            with engine.begin() as connection:
                connection.execute(select(func.pg_advisory_xact_lock(_TURN)))
                yield
        else:
            with self._lock:
                yield


@contextmanager
def storage_errors() -> Iterator[None]:
    """Convert errors while working on a study, such as a full disk or a damaged file, to ``UserError``."""
    try:
        yield
    except (SQLAlchemyError, OptunaError) as error:
        raise UserError(
            f"the study cannot be read or written: {first_line(error.__cause__ or error)}\n"
            f"run the same command again to resume; {IF_DAMAGED}"
        ) from error


def _cannot_open(url: str, error: Exception) -> UserError:
    """Return the error for a database that cannot be opened, without the URL's password."""
    if isinstance(error, ModuleNotFoundError) and (missing := missing_extra(error)):
        return missing
    try:
        shown = make_url(url).render_as_string()  # without its password
    except ArgumentError:
        shown = url
    remedy = "use an SQLAlchemy URL, such as sqlite:///study.db or postgresql://user@host/database"
    if type(error) is DatabaseError:  # the file exists, but is no database
        remedy = IF_DAMAGED
    return UserError(f"cannot open the storage {shown}: {first_line(error)}\n{remedy}")
