"""Keep the studies of a search in a database, and divide the tasks of a study among its workers.

A task is a number below a limit; each becomes a trial of Optuna, which records a heartbeat of each running one and
fails those of dead workers, whose tasks are then free again. The database is SQLite or PostgreSQL.
"""

import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna import exceptions, pruners
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.storages._heartbeat import get_heartbeat_thread, is_heartbeat_enabled
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import exc, make_url, pool

from spkv_nas.base import errors, extras

HEARTBEAT = 10  # seconds between heartbeats
GRACE = 60  # seconds without one until a trial fails
STARTUP = 4  # complete retrainings before any is pruned: a median of fewer says little
INDEX = "index"  # user attribute of a trial: number of its task
_SETTINGS = "settings"  # user attribute of a study
_POLL = 0.2  # seconds between looks at the trials of other workers
_ATTEMPTS = 10  # to create the tables, which several workers may do at once
_IF_DAMAGED = (
    "if its file is damaged, remove it: scores and retrained checkpoints are kept in other files"
)
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
Run = Callable[[Trial, int], Sequence[float]]
_OPTIONS = {
    "sqlite": {"poolclass": pool.NullPool, "connect_args": {"timeout": 60}},
    # Reconnect if the server was restarted
    "postgresql": {"poolclass": pool.NullPool, "pool_pre_ping": True},
}


def open_storage(url: str) -> RDBStorage:
    """Open the database of a URL of SQLAlchemy, and create its tables if missing. Raises ``UserError`` if it cannot."""
    try:
        dialect = make_url(url).get_backend_name()
        # Try again while other workers create the same tables
        for attempt in range(_ATTEMPTS):
            try:
                with _stable():
                    return RDBStorage(
                        url,
                        engine_kwargs=_OPTIONS.get(dialect, {}),
                        heartbeat_interval=HEARTBEAT,
                        grace_period=GRACE,
                    )
            except exc.SQLAlchemyError as error:
                is_race = "exist" in str(error) or "UNIQUE" in str(error)
                if attempt + 1 == _ATTEMPTS or not is_race:
                    raise
                time.sleep(random.random())
        raise AssertionError
    except (exc.SQLAlchemyError, ImportError, ValueError, RuntimeError, OSError) as error:
        raise _cannot_open(url, error) from error


def open_study(
    storage: RDBStorage, name: str, settings: Mapping[str, Any], metrics: Sequence[str]
) -> optuna.Study:
    """Open or create a study whose tasks have values of the names ``metrics``, all to be minimised.

    ``settings`` are all that results depend on. Raises ``UserError``: the study exists with other settings.
    """
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        directions=["minimize"] * len(metrics),
        load_if_exists=True,
        pruner=pruners.MedianPruner(n_startup_trials=STARTUP),
    )
    # Record the settings, or compare them with those of the existing study
    # They are missing if the study is new, or its creator was killed between two writes
    if _SETTINGS not in study.user_attrs:
        study.set_user_attr(_SETTINGS, dict(settings))
        with _stable():
            study.set_metric_names(list(metrics))
    recorded = study.user_attrs[_SETTINGS]
    for key in settings:
        if recorded.get(key) != settings[key]:
            raise errors.UserError(
                f"the study '{name}' exists with another {key}: {recorded.get(key)}, not "
                f"{settings[key]}\n"
                "use the same options to continue it, or set another --name"
            )
    return study


def finished(study: optuna.Study, number: int) -> dict[int, FrozenTrial]:
    """Return the first finished trial, complete or pruned, of each of the tasks 0 to ``number`` - 1, in order."""
    return _finished(_read(study), number)


def work(
    study: optuna.Study,
    number: int,
    run: Run,
    progress: Callable[[int, int], None] = lambda done, total: None,
    num_prior: Callable[[int], int] = lambda index: 0,
) -> dict[int, FrozenTrial]:
    """Work on the tasks 0 to ``number`` - 1 of a study until all workers have finished them; return ``finished``.

    ``run`` returns the values of a task; it may report to its trial, and raise ``TrialPruned``. ``num_prior`` maps a
    task to the number of first tasks that must be finished before it starts.
    """
    while len(done := finished(study, number)) < number:
        progress(len(done), number)
        # Release the tasks of dead workers, and run a free one, or wait for the other workers
        with _stable():
            fail_stale_trials(study)
        if _free(_read(study), number, num_prior):
            _run_free(study, number, run, num_prior)
        else:
            time.sleep(_POLL)
    progress(number, number)
    return done


def _run_free(study: optuna.Study, number: int, run: Run, num_prior: Callable[[int], int]) -> None:
    """Run the first free task, if there is one, as a trial; of several that take it at once, the first keeps it."""
    with _stable():
        trial = study.ask()
        state = TrialState.FAIL
        values = None
    with get_heartbeat_thread(trial._trial_id, trial.storage):
        try:
            free = _free(_read(study), number, num_prior)
            if free:
                index = free[0]
                # Else a worker that dies before Optuna's first heartbeat holds the task forever
                if is_heartbeat_enabled(trial.storage):
                    trial.storage.record_heartbeat(trial._trial_id)
                trial.set_user_attr(INDEX, index)
                earlier_trials = _read(study)[: trial.number]
                if index in _free(earlier_trials, number, lambda _: 0):
                    values = run(trial, index)
                    state = TrialState.COMPLETE
        except exceptions.TrialPruned:
            state = TrialState.PRUNED
        finally:
            # Unless another worker took it for dead, and runs the task
            study.tell(trial, values, state, skip_if_finished=True)


def _read(study: optuna.Study) -> list[FrozenTrial]:
    """Return all trials of a study. Raises ``UserError`` if the database has malformed content."""
    try:
        return [*study.get_trials(deepcopy=False)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise errors.UserError(
            f"the study cannot be read: {errors.first_line(error)}\n{_IF_DAMAGED}"
        ) from error


def _free(trials: Sequence[FrozenTrial], number: int, num_prior: Callable[[int], int]) -> list[int]:
    """Return the tasks that may start, and that none of all trials has finished or is running."""
    done = _finished(trials, number)
    running = {trial.user_attrs.get(INDEX) for trial in trials if trial.state == TrialState.RUNNING}
    first_unfinished = next(index for index in range(number + 1) if index not in done)
    free = []
    for index in range(number):
        is_taken = index in done or index in running
        if not is_taken and num_prior(index) <= first_unfinished:
            free.append(index)
    return free


def _finished(trials: Sequence[FrozenTrial], number: int) -> dict[int, FrozenTrial]:
    """Return the first finished one among ``trials`` of each task; those without a task do not count."""
    first: dict[int, FrozenTrial] = {}
    for trial in trials:
        index = trial.user_attrs.get(INDEX)
        if trial.state in _FINISHED and index is not None and index < number:
            first.setdefault(index, trial)
    return dict(sorted(first.items()))


@contextmanager
def storage_errors() -> Iterator[None]:
    """Convert errors while working on a study, such as a full disk or a damaged file, to ``UserError``."""
    try:
        yield
    except (exc.SQLAlchemyError, exceptions.OptunaError) as error:
        raise errors.UserError(
            f"the study cannot be read or written: {errors.first_line(error.__cause__ or error)}\n"
            f"run the same command again to resume; {_IF_DAMAGED}"
        ) from error


@contextmanager
def _stable() -> Iterator[None]:
    """Silence Optuna's warnings: heartbeats and names of metrics are experimental, and ask() leaves beating to us."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Heartbeat of storage")
        warnings.simplefilter("ignore", exceptions.ExperimentalWarning)
        yield


def _cannot_open(url: str, error: Exception) -> errors.UserError:
    """Return the error for a database that cannot be opened, without the URL's password."""
    cause = error.__cause__ or error
    missing = extras.missing_extra(cause) if isinstance(cause, ModuleNotFoundError) else None
    if missing:
        return missing
    # Leave the password out of the message
    try:
        shown = make_url(url).render_as_string()
    except exc.ArgumentError:
        shown = url
    remedy = "use an SQLAlchemy URL, such as sqlite:///study.db or postgresql://user@host/database"
    # The file exists, but is no database
    if type(error) is exc.DatabaseError:
        remedy = _IF_DAMAGED
    return errors.UserError(
        f"cannot open the storage {shown}: {errors.first_line(error)}\n{remedy}"
    )
