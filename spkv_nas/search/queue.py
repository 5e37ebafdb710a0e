"""Use an Optuna study as a queue of numbered tasks for several processes and machines.

Each worker has a study attribute with its identity, its last heartbeat and the tasks it has claimed. A finished task
becomes a complete trial, in one transaction. When a worker dies its tasks are released: at once on the same machine,
where its process is gone, otherwise after ``GRACE`` seconds without a heartbeat. A task counts once, whoever finishes
it first. Trials store a hash of their content, because databases do not detect flipped bits. (Optuna itself only
recovers trials of ``Study.optimize``; and workers must claim tasks one after the other, hence the lock of
``search/storage.py``.)
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from itertools import chain
from typing import Any

import optuna
import psutil
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, OptunaError
from optuna.trial import TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.search.storage import IF_DAMAGED, Storage
from spkv_nas.search.trials import Result

HEARTBEAT, GRACE = 20.0, 300.0  # seconds
FORMAT = 2  # version of studies; version 1 had a parameter per head
SETTINGS, _FORMAT, WORKER = "settings", "format", "worker"  # user attributes of a study; WORKER is a key prefix
INDEX, POINT, STOPPED, _HASH = "index", "point", "stopped", "hash"  # user attributes of a trial


class Queue:
    """One worker's view of a study; see the module's docstring.

    Args:
        storage: database of the studies.
        name: name of the study.
        settings: all that results depend on; an existing study with other settings is refused.
        metrics: names of a task's values, all to be minimised, for viewers of the study.

    Raises:
        UserError: the study exists with other settings.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        settings: Mapping[str, Any],
        *,
        metrics: Sequence[str] = ("value",),
    ) -> None:
        """Open or create the study, compare its settings, and register this worker."""
        self._storage, self._results, self._num_read = storage, dict[int, Result](), 0
        self._me, self._key, self._tasks = Worker.current(), f"{WORKER} {uuid.uuid4().hex}", set[int]()
        # Create the study, or load it
        directions = ["minimize"] * len(metrics)
        with self._storage.turn():
            try:
                self._study = optuna.create_study(storage=storage.studies, study_name=name, directions=directions)
            except DuplicatedStudyError:
                self._study = optuna.load_study(storage=storage.studies, study_name=name)
            if SETTINGS not in self._attributes():  # new, or its creator was killed between two writes
                self._study.set_user_attr(SETTINGS, {_FORMAT: FORMAT, **settings})
        # Compare the settings
        recorded = self._attributes()[SETTINGS]
        if recorded.get(_FORMAT) != FORMAT:
            raise UserError(
                f"the study '{name}' was created by another version of spkv-nas\n"
                "set another --name, or remove its file: scores and retrained checkpoints are kept in other files"
            )
        for key in settings:
            if recorded.get(key) != settings[key]:
                raise UserError(
                    f"the study '{name}' exists with another {key}: {recorded.get(key)}, not {settings[key]}\n"
                    "use the same options to continue it, or set another --name"
                )
        # Name the metrics and register this worker
        self._name_metrics(metrics)
        self._write_heartbeat()

    def claim(self, number: int, limit: int, num_prior_results: Callable[[int], int] = lambda index: 0) -> list[int]:
        """Claim free tasks among the first ``number``, in order; none if no task is free or may start yet.

        Args:
            number: total number of tasks.
            limit: maximum to claim; fewer are claimed if there are not enough for all workers.
            num_prior_results: maps a task to the number of first tasks that must be finished before it may start.
        """
        with self._storage.turn():
            results = self.results()
            first_unfinished = next(index for index in range(len(results) + 1) if index not in results)
            live_workers = [worker for worker in self._others() if worker.is_alive]
            unavailable = {*results, *self._tasks, *chain.from_iterable(worker.tasks for worker in live_workers)}
            free = [
                index
                for index in range(number)
                if index not in unavailable and num_prior_results(index) <= first_unfinished
            ]
            claimed = free[: min(limit, math.ceil(len(free) / (1 + len(live_workers))))]
            if claimed:
                self._tasks = self._tasks.union(claimed)
                self._write_heartbeat()
        return claimed

    def finish(self, index: int, values: Sequence[float], point: str = "", *, stopped: bool = False) -> None:
        """Record a result; NaN is stored as infinity, because Optuna would treat it as a failure."""
        result = Result(point, [math.inf if math.isnan(value) else float(value) for value in values], stopped)
        attributes = {INDEX: index, POINT: point, STOPPED: stopped, _HASH: _hash(index, result)}
        self._study.add_trial(create_trial(values=result.values, user_attrs=attributes))
        self._tasks = self._tasks - {index}

    @contextmanager
    def holding(self, tasks: Sequence[int]) -> Iterator[None]:
        """Send heartbeats while the block runs, and release the tasks that are unfinished at its end."""
        stop = threading.Event()

        def beat() -> None:
            """Send heartbeats until the block ends."""
            while not stop.wait(HEARTBEAT):
                with suppress(SQLAlchemyError, OptunaError):  # if it persists, the worker itself will hit it
                    self._write_heartbeat()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            if self._tasks.intersection(tasks):
                self._tasks = self._tasks.difference(tasks)
                self._write_heartbeat()

    def results(self) -> dict[int, Result]:
        """Return the results of finished tasks by number, in order. Raises ``UserError`` if a trial was altered."""
        with _database_errors():
            trials = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            for trial in trials[self._num_read :]:
                attributes = trial.user_attrs
                if INDEX not in attributes:  # added by hand
                    continue
                result = Result(attributes[POINT], trial.values, attributes[STOPPED])
                if attributes[_HASH] != _hash(attributes[INDEX], result):
                    raise UserError(
                        f"the study '{self._study.study_name}' is damaged: its trial {trial.number} has changed\n"
                        f"{IF_DAMAGED}"
                    )
                self._results.setdefault(attributes[INDEX], result)
            self._num_read = len(trials)
        return dict(sorted(self._results.items()))

    def _name_metrics(self, metrics: Sequence[str]) -> None:
        """Name the values of a study that is new, or older than metric names."""
        with _database_errors(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # set_metric_names is experimental
            if self._study.metric_names != list(metrics) and len(metrics) == len(self._study.directions):
                self._study.set_metric_names(list(metrics))

    def _write_heartbeat(self) -> None:
        """Record the tasks this worker holds and the current time."""
        self._study.set_user_attr(self._key, asdict(replace(self._me, seen=time.time(), tasks=list(self._tasks))))

    def _others(self) -> list[Worker]:
        """Return the other workers of the study."""
        with _database_errors():
            return [
                Worker(**fields)
                for key, fields in self._attributes().items()
                if key.startswith(WORKER) and key != self._key
            ]

    def _attributes(self) -> dict[str, Any]:
        """Return the user attributes of the study."""
        with _database_errors():
            return dict(self._study.user_attrs)


@dataclass(frozen=True)
class Worker:
    """A worker process, the time of its last heartbeat, and its claimed tasks."""

    host: str
    process: int
    started: float
    seen: float = 0.0
    tasks: Sequence[int] = ()

    @classmethod
    def current(cls) -> Worker:
        """Return the worker for the current process."""
        return cls(_machine(), os.getpid(), psutil.Process().create_time())

    @property
    def is_alive(self) -> bool:
        """Return true if its process runs on this machine, or another machine sent a heartbeat recently."""
        if self.host != _machine():
            return time.time() - self.seen <= GRACE
        try:
            process = psutil.Process(self.process)
            is_same_process = abs(process.create_time() - self.started) < 1.0  # process ids are reused
            return bool(is_same_process and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


@contextmanager
def _database_errors() -> Iterator[None]:
    """Convert Optuna's exceptions for malformed database content to ``UserError``."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"the study cannot be read: {first_line(error)}\n{IF_DAMAGED}") from error


def _machine() -> str:
    """Return an id of this machine: host name and boot time, because host names are not unique."""
    return f"{socket.gethostname()} {psutil.boot_time():.0f}"


def _hash(index: int, result: Result) -> str:
    """Return a hash of a task's number and result."""
    return hashlib.sha256(json.dumps([index, *astuple(result)]).encode()).hexdigest()[:16]
