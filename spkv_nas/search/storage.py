"""Where the studies of a search lie, and how its workers take turns in them.

SQLite is a file in the search's folder, and so is its lock. Workers on machines whose file system has no good locks
share a PostgreSQL server, which has its own: they end with their holder's connection, as a file's with its process.
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

IF_DAMAGED = "if its file is damaged, remove it: what was scored and retrained is kept beside it"
_SERVER = "postgresql"
_TURN = 5353118  # number of the server's lock
_OPTIONS = {
    "sqlite": {"connect_args": {"timeout": 60}},
    _SERVER: {"pool_pre_ping": True},  # it may have been restarted since
}


class Storage:
    """Optuna's studies in a database, whose tables are made if need be.

    Args:
        url: SQLAlchemy's, of an SQLite file or a PostgreSQL database.
        lock: file of the lock, unless the database has its own.

    Raises:
        UserError: a URL that cannot be opened.
    """

    def __init__(self, url: str, lock: Path) -> None:
        try:
            engine = create_engine(url, poolclass=NullPool)
            self._lock = shared_lock(lock)
            lock.parent.mkdir(parents=True, exist_ok=True)
            with self._turn(engine):  # two processes cannot make the tables at once
                self.studies = RDBStorage(url, engine_kwargs=_OPTIONS.get(engine.dialect.name, {}))
        except (SQLAlchemyError, ImportError, ValueError, RuntimeError, OSError) as error:
            raise _cannot_open(url, error) from error

    def turn(self) -> AbstractContextManager[None]:
        """One worker at a time is inside; the others wait."""
        return self._turn(self.studies.engine)

    @contextmanager
    def _turn(self, engine: Engine) -> Iterator[None]:
        if engine.dialect.name == _SERVER:
            with engine.begin() as connection:
                connection.execute(select(func.pg_advisory_xact_lock(_TURN)))
                yield
        else:
            with self._lock:
                yield


@contextmanager
def storage_errors() -> Iterator[None]:
    """Say in one line what befalls a study while it is worked on, such as a full disk or a damaged file."""
    try:
        yield
    except (SQLAlchemyError, OptunaError) as error:
        raise UserError(
            f"the study cannot be read or written: {first_line(error.__cause__ or error)}\n"
            f"the same command goes on when it can; {IF_DAMAGED}"
        ) from error


def _cannot_open(url: str, error: Exception) -> UserError:
    if isinstance(error, ModuleNotFoundError) and (missing := missing_extra(error)):
        return missing
    try:
        shown = make_url(url).render_as_string()  # without its password
    except ArgumentError:
        shown = url
    remedy = "give an SQLAlchemy URL, such as sqlite:///study.db or postgresql://user@host/database"
    if type(error) is DatabaseError:  # a file that is there, but no database
        remedy = IF_DAMAGED
    return UserError(f"cannot open the storage {shown}: {first_line(error)}\n{remedy}")
