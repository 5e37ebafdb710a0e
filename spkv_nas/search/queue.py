"""An Optuna study as a list of numbered tasks that several processes and machines work through.

A worker has an attribute of the study, which says who it is, when it last showed that it lives, and which tasks it has
claimed. What it finishes becomes a complete trial, in one transaction. Nothing is lost when a worker dies: its tasks
are free again, at once on the same machine (its process is gone), after ``GRACE`` seconds without a sign of life
elsewhere. A number counts once, whoever finishes it first. A trial has a hash of its content, because a database does
not notice a flipped bit. (Optuna itself recovers trials of ``Study.optimize`` alone; and workers that look for free
tasks must do so one after the other, hence the turns of ``search/storage.py``.)
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
FORMAT = 2  # of a study; before that a layout had a parameter per head
SETTINGS, _FORMAT, WORKER = "settings", "format", "worker"  # user attributes of a study; the last begins the keys
INDEX, POINT, STOPPED, _HASH = "index", "point", "stopped", "hash"  # user attributes of a trial


class Queue:
    """One worker's view of a study; see the module's docstring.

    Args:
        settings: whatever decides the results; a study that has others is refused.
        metrics: names of the values of a task, each the better the lower, for whoever looks at the study.

    Raises:
        UserError: the study is there with other settings.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        settings: Mapping[str, Any],
        *,
        metrics: Sequence[str] = ("value",),
    ) -> None:
        self._storage, self._results, self._num_read = storage, dict[int, Result](), 0
        self._me, self._key, self._tasks = Worker.here(), f"{WORKER} {uuid.uuid4().hex}", set[int]()
        directions = ["minimize"] * len(metrics)
        with self._storage.turn():
            try:
                self._study = optuna.create_study(storage=storage.studies, study_name=name, directions=directions)
            except DuplicatedStudyError:
                self._study = optuna.load_study(storage=storage.studies, study_name=name)
            if SETTINGS not in self._attributes():  # new, or its worker was killed between two writes
                self._study.set_user_attr(SETTINGS, {_FORMAT: FORMAT, **settings})
        recorded = self._attributes()[SETTINGS]
        if recorded.get(_FORMAT) != FORMAT:
            raise UserError(
                f"the study '{name}' is of another version of spkv-nas\n"
                "give another --name, or remove its file: what was scored and retrained is kept beside it"
            )
        for key in settings:
            if recorded.get(key) != settings[key]:
                raise UserError(
                    f"the study '{name}' is there with another {key}: {recorded.get(key)}, not {settings[key]}\n"
                    "give the same options to go on with it, or another --name"
                )
        self._name_metrics(metrics)
        self._tell()

    def claim(self, number: int, most: int, known_before: Callable[[int], int] = lambda index: 0) -> list[int]:
        """Free tasks of the first ``number``, in order; none if nothing is free or may begin yet.

        Args:
            most: fewer if there is not so much for each of the study's workers.
            known_before: the tasks below this number must all be finished before the task may begin.
        """
        with self._storage.turn():
            done = self.results()
            whole = next(index for index in range(len(done) + 1) if index not in done)  # all below are finished
            others = [worker for worker in self._others() if worker.is_alive]
            taken = {*done, *self._tasks, *chain.from_iterable(worker.tasks for worker in others)}
            free = [index for index in range(number) if index not in taken and known_before(index) <= whole]
            claimed = free[: min(most, math.ceil(len(free) / (1 + len(others))))]
            if claimed:
                self._tasks = self._tasks.union(claimed)
                self._tell()
        return claimed

    def finish(self, index: int, values: Sequence[float], point: str = "", *, stopped: bool = False) -> None:
        """Record a result; a NaN as infinite, which Optuna would call a failure."""
        result = Result(point, [math.inf if math.isnan(value) else float(value) for value in values], stopped)
        told = {INDEX: index, POINT: point, STOPPED: stopped, _HASH: _hash(index, result)}
        self._study.add_trial(create_trial(values=result.values, user_attrs=told))
        self._tasks = self._tasks - {index}

    @contextmanager
    def holding(self, tasks: Sequence[int]) -> Iterator[None]:
        """Show that this worker is alive; what it has not finished when the block ends is free again."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(HEARTBEAT):
                with suppress(SQLAlchemyError, OptunaError):  # if it lasts, the worker itself meets it
                    self._tell()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            if self._tasks.intersection(tasks):
                self._tasks = self._tasks.difference(tasks)
                self._tell()

    def results(self) -> dict[int, Result]:
        """The finished tasks by number, in order. Raises ``UserError``: a trial is not what was written."""
        with _damage():
            trials = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            for trial in trials[self._num_read :]:
                told = trial.user_attrs
                if INDEX not in told:  # put there by hand
                    continue
                result = Result(told[POINT], trial.values, told[STOPPED])
                if told[_HASH] != _hash(told[INDEX], result):
                    raise UserError(
                        f"the study '{self._study.study_name}' is damaged: its trial {trial.number} has changed\n"
                        f"{IF_DAMAGED}"
                    )
                self._results.setdefault(told[INDEX], result)
            self._num_read = len(trials)
        return dict(sorted(self._results.items()))

    def _name_metrics(self, metrics: Sequence[str]) -> None:
        """Name the values of a study that was just made, or made before they had names."""
        with _damage(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # Optuna's names of metrics
            if self._study.metric_names != list(metrics) and len(metrics) == len(self._study.directions):
                self._study.set_metric_names(list(metrics))

    def _tell(self) -> None:
        """Write down what this worker holds, and that it is alive."""
        self._study.set_user_attr(self._key, asdict(replace(self._me, seen=time.time(), tasks=list(self._tasks))))

    def _others(self) -> list[Worker]:
        with _damage():
            return [
                Worker(**told)
                for key, told in self._attributes().items()
                if key.startswith(WORKER) and key != self._key
            ]

    def _attributes(self) -> dict[str, Any]:
        with _damage():
            return dict(self._study.user_attrs)


@dataclass(frozen=True)
class Worker:
    """A process, the time of its last sign of life, and the tasks that it has claimed."""

    host: str
    process: int
    started: float
    seen: float = 0.0
    tasks: Sequence[int] = ()

    @classmethod
    def here(cls) -> Worker:
        """This process."""
        return cls(_machine(), os.getpid(), psutil.Process().create_time())

    @property
    def is_alive(self) -> bool:
        """Whether its process is there, or on another machine it was not silent for too long."""
        if self.host != _machine():
            return time.time() - self.seen <= GRACE
        try:
            process = psutil.Process(self.process)
            same = abs(process.create_time() - self.started) < 1.0  # numbers are used again
            return bool(same and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


@contextmanager
def _damage() -> Iterator[None]:
    """What Optuna raises for JSON and numbers in a database that are not, as a ``UserError``."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"the study cannot be read: {first_line(error)}\n{IF_DAMAGED}") from error


def _machine() -> str:
    """Name of this machine, and when it was started: many have the same name."""
    return f"{socket.gethostname()} {psutil.boot_time():.0f}"


def _hash(index: int, result: Result) -> str:
    return hashlib.sha256(json.dumps([index, *astuple(result)]).encode()).hexdigest()[:16]
