"""An Optuna study as a list of numbered tasks that several processes and machines work through.

A worker claims some tasks, which puts running trials with their numbers into the study, tells their values, and takes
the next. Nothing is lost when a worker dies: whoever claims next marks its trials failed and their numbers are free
again, at once on the same machine (its process is gone), after ``GRACE`` seconds without a sign of life elsewhere. A
number counts once, whichever of its trials finishes first. What a trial is and measured stands in it twice, because a
database does not notice a flipped bit. (Optuna recovers trials of ``Study.optimize`` alone, by a
heartbeat; and under SQLite two workers may be given the same trial, hence the lock file.)
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import optuna
import psutil
from optuna.distributions import BaseDistribution
from optuna.exceptions import DuplicatedStudyError, OptunaError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.locks import shared_lock

HEARTBEAT, GRACE = 20.0, 300.0  # seconds
INDEX = "index"  # user attribute of a trial: the number of its task, the same when it is tried again
_IF_DAMAGED = "if its file is damaged, remove it: what was scored and retrained is kept beside it"
_WORKER, _MARK, _SETTINGS = "worker", "mark", "settings"
_STOPPED = "stopped"  # user attribute of a trial whose score is an estimate: its values
_POINT, _VALUES = "point", "values"  # user attributes: what a trial's number, parameters and values were when written


def open_storage(url: str, lock: Path) -> BaseStorage:
    """An Optuna storage; under the ``lock``, because two processes cannot make its tables at once.

    Raises:
        UserError: a URL that cannot be opened.
    """
    patience = {"connect_args": {"timeout": 60}} if url.startswith("sqlite:") else {}
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with shared_lock(lock):
            return RDBStorage(url, engine_kwargs=patience)
    except (SQLAlchemyError, ImportError, ValueError, RuntimeError, OSError) as error:
        remedy = "give an SQLAlchemy URL, such as sqlite:///study.db or postgresql://host/database"
        if type(error) is DatabaseError:  # a file that is there, but no database
            remedy = _IF_DAMAGED
        raise UserError(f"cannot open the storage {url}: {first_line(error)}\n{remedy}") from error


@contextmanager
def storage_errors() -> Iterator[None]:
    """Say in one line what befalls a study while it is worked on, such as a full disk or a damaged file."""
    try:
        yield
    except (SQLAlchemyError, OptunaError) as error:
        raise UserError(
            f"the study cannot be read or written: {first_line(error.__cause__ or error)}\n"
            f"the same command goes on when it can; {_IF_DAMAGED}"
        ) from error


@dataclass(frozen=True)
class Task:
    """A claimed task: its number, the number of its trial, and the trial's parameters."""

    index: int
    trial: int
    params: dict[str, str]


class Queue:
    """See the module's docstring.

    Args:
        settings: whatever decides the results; a study that has others is refused.
        lock: file of the lock that this workspace's workers share.
        distributions: of the trials' parameters.

    Raises:
        UserError: the study is there with other settings.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        settings: Mapping[str, Any],
        lock: Path,
        *,
        directions: Sequence[str] = ("minimize",),
        distributions: Mapping[str, BaseDistribution] | None = None,
    ) -> None:
        self._storage, self._distributions, self._lock = storage, dict(distributions or {}), shared_lock(lock)
        with self._lock:
            try:
                self._study = optuna.create_study(storage=storage, study_name=name, directions=list(directions))
            except DuplicatedStudyError:
                self._study = optuna.load_study(storage=storage, study_name=name)
            if _SETTINGS not in self._attributes():  # new, or its worker was killed between two writes
                self._study.set_user_attr(_SETTINGS, dict(settings))
        recorded = self._attributes()[_SETTINGS]
        for key in settings:
            if recorded.get(key) != settings[key]:
                raise UserError(
                    f"the study '{name}' is there with another {key}: {recorded.get(key)}, not {settings[key]}\n"
                    "give the same options to go on with it, or another --name"
                )

    @property
    def directions(self) -> list[StudyDirection]:
        """Of the values."""
        return list(self._study.directions)

    def claim(
        self,
        number: int,
        most: int,
        point: Callable[[int, list[FrozenTrial]], dict[str, str]] = lambda index, trials: {},
        known_before: Callable[[int], int] = lambda index: 0,
    ) -> list[Task]:
        """Up to ``most`` free tasks of the first ``number``, in order; none if nothing is free or may begin yet.

        Args:
            point: the parameters of a task, from its number and the finished tasks that it may know, in order.
            known_before: those below this number, which all must be finished before the task may begin.
        """
        claimed: list[Task] = []
        with self._lock:
            self._recover()
            done = self.results()
            busy = {trial.user_attrs[INDEX] for trial in self._trials(TrialState.RUNNING)}
            for index in range(number):
                if index in done or index in busy:
                    continue
                stop = known_before(index)
                if len(claimed) == most or not all(earlier in done for earlier in range(stop)):
                    break
                params = point(index, [done[earlier] for earlier in range(stop)])
                claimed.append(Task(index, self._put(index, params), params))
        return claimed

    def finish(self, task: Task, values: Sequence[float], *, stopped: bool = False) -> None:
        """Record a result, and whether it is an estimate of what was stopped.

        It is dropped if the task was given to another worker in the meantime. A NaN counts as infinite: Optuna would
        call the trial failed, and the task would be tried for ever.
        """
        told = [math.inf if math.isnan(value) else float(value) for value in values]
        try:
            trial = self._study.get_trials(deepcopy=False)[task.trial]
            for key in (_VALUES, _STOPPED) if stopped else (_VALUES,):
                self._storage.set_trial_user_attr(trial._trial_id, key, told)
            self._study.tell(task.trial, told)
        except (ValueError, UpdateFinishedTrialError):
            if self._study.get_trials(deepcopy=False)[task.trial].state != TrialState.FAIL:
                raise

    @contextmanager
    def holding(self, tasks: Sequence[Task]) -> Iterator[None]:
        """Show that this worker is alive; what it has not finished when the block ends is free again."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(HEARTBEAT):
                with suppress(SQLAlchemyError, OptunaError):  # if it lasts, the worker itself meets it
                    self._study.set_user_attr(_key(_worker()), time.time())

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            mine = {task.trial for task in tasks}
            with self._lock:
                for trial in self._trials(TrialState.RUNNING):
                    if trial.number in mine:
                        self._free(trial)

    def results(self) -> dict[int, FrozenTrial]:
        """The finished tasks by number, in order. Raises ``UserError``: a trial is not what was written."""
        finished: dict[int, FrozenTrial] = {}
        for trial in self._trials(TrialState.COMPLETE):
            attributes = trial.user_attrs
            point = _point(attributes[INDEX], trial.params)
            values = [attributes.get(key, trial.values) for key in (_VALUES, _STOPPED)]
            if attributes.get(_POINT, point) != point or values != [trial.values] * 2:
                raise UserError(
                    f"the study '{self._study.study_name}' is damaged: its trial {trial.number} has changed\n"
                    f"{_IF_DAMAGED}"
                )
            finished.setdefault(trial.user_attrs[INDEX], trial)
        return dict(sorted(finished.items()))

    def _put(self, index: int, params: Mapping[str, str]) -> int:
        """Put a running trial into the study; its number."""
        mark = uuid.uuid4().hex
        self._study.set_user_attr(_key(_worker()), time.time())
        self._study.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params=dict(params),
                distributions=self._distributions if params else {},
                user_attrs={INDEX: index, _POINT: _point(index, params), _WORKER: _worker(), _MARK: mark},
            )
        )
        return next(int(t.number) for t in self._trials(TrialState.RUNNING) if t.user_attrs[_MARK] == mark)

    def _recover(self) -> None:
        alive = self._attributes()
        for trial in self._trials(TrialState.RUNNING):
            if _is_lost(trial.user_attrs[_WORKER], alive):
                self._free(trial)

    def _free(self, trial: FrozenTrial) -> None:
        with suppress(ValueError, UpdateFinishedTrialError):  # somebody without our lock was faster
            self._study.tell(trial.number, state=TrialState.FAIL)

    def _trials(self, state: TrialState) -> list[FrozenTrial]:
        with _damage():
            return [t for t in self._study.get_trials(deepcopy=False, states=(state,)) if INDEX in t.user_attrs]

    def _attributes(self) -> dict[str, Any]:
        with _damage():
            return dict(self._study.user_attrs)


def is_stopped(trial: FrozenTrial) -> bool:
    """Whether the values of a finished task are an estimate."""
    return _STOPPED in trial.user_attrs


@contextmanager
def _damage() -> Iterator[None]:
    """What Optuna raises for JSON and numbers in a database that are not, as a ``UserError``."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"the study cannot be read: {first_line(error)}\n{_IF_DAMAGED}") from error


def _point(index: int, params: Mapping[str, Any]) -> str:
    return json.dumps([index, params], sort_keys=True)


@cache
def _worker() -> dict[str, Any]:
    """Who this process is."""
    return {"host": socket.gethostname(), "process": os.getpid(), "started": psutil.Process().create_time()}


def _key(worker: Mapping[str, Any]) -> str:
    """Name of the study's attribute with the time of a worker's last sign of life."""
    return f"alive {worker['host']} {worker['process']} {worker['started']:.2f}"


def _is_lost(worker: Mapping[str, Any], alive: Mapping[str, Any]) -> bool:
    """Whether a worker is dead: its process is gone, or on another machine it has been silent for too long."""
    if worker["host"] != socket.gethostname():
        return bool(time.time() - alive.get(_key(worker), 0.0) > GRACE)
    try:
        process = psutil.Process(worker["process"])
        same = abs(process.create_time() - worker["started"]) < 1.0  # numbers are used again
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
