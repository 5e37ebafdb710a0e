"""The queue of a search: numbered tasks of several workers, some of which die, in a study that may be damaged."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_table
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import StorageInternalError

from spkv_nas.artifacts.samplers import SAMPLERS
from spkv_nas.base.errors import UserError
from spkv_nas.search import queue as queue_module
from spkv_nas.search.queue import GRACE, Queue, Task, open_storage, storage_errors
from spkv_nas.search.sampler import Sampler, first_of_generation
from spkv_nas.search.space import Space


@pytest.fixture
def make_queue(tmp_path: Path) -> Callable[..., Queue]:
    storage = open_storage(f"sqlite:///{tmp_path / 'study.db'}", tmp_path / "lock")

    def make(**settings: Any) -> Queue:
        return Queue(storage, "study", settings, tmp_path / "lock")

    return make


def finish_all(queue: Queue, tasks: list[Task]) -> None:
    for task in tasks:
        queue.finish(task, [float(task.index)])


class TestQueue:
    def test_tasks_come_in_order_and_once(self, make_queue: Callable[..., Queue]) -> None:
        one, other = make_queue(), make_queue()
        first, second, third = one.claim(5, 2), other.claim(5, 2), one.claim(5, 2)
        assert [[task.index for task in tasks] for tasks in (first, second, third)] == [[0, 1], [2, 3], [4]]
        assert other.claim(5, 2) == []
        finish_all(other, second)
        finish_all(one, [*first, *third])
        assert {index: trial.values for index, trial in one.results().items()} == {i: [float(i)] for i in range(5)}

    def test_a_generation_waits_for_the_one_before(self, make_queue: Callable[..., Queue]) -> None:
        queue = make_queue()
        seen: dict[int, int] = {}

        def point(index: int, known: list[Any]) -> dict[str, str]:
            seen[index] = len(known)
            return {}

        def before(index: int) -> int:
            return index - index % 2

        first = queue.claim(4, 3, point, before)
        assert [task.index for task in first] == [0, 1]
        assert queue.claim(4, 3, point, before) == []
        finish_all(queue, first)
        assert [task.index for task in queue.claim(4, 3, point, before)] == [2, 3]
        assert seen == {0: 0, 1: 0, 2: 2, 3: 2}

    def test_tasks_of_a_dead_process_are_given_again(
        self, make_queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        queue, here = make_queue(), queue_module._worker()
        with monkeypatch.context() as patch:
            patch.setattr(queue_module, "_worker", lambda: {**here, "process": gone.pid})
            lost = queue.claim(3, 2)
        again = queue.claim(3, 3)
        assert [task.index for task in again] == [0, 1, 2]
        queue.finish(lost[0], [99.0])  # it was alive after all, too late
        finish_all(queue, again)
        assert [trial.values[0] for trial in queue.results().values()] == [0.0, 1.0, 2.0]

    def test_another_machine_is_given_time(
        self, make_queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        queue, here = make_queue(), queue_module._worker()
        with monkeypatch.context() as patch:
            patch.setattr(queue_module, "_worker", lambda: {**here, "host": "elsewhere"})
            queue.claim(1, 1)
        assert queue.claim(1, 1) == []
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + GRACE + 10)
        assert [task.index for task in queue.claim(1, 1)] == [0]

    def test_signs_of_life_keep_tasks(self, make_queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch) -> None:
        queue, here = make_queue(), queue_module._worker()
        monkeypatch.setattr(queue_module, "HEARTBEAT", 0.05)
        with monkeypatch.context() as patch:
            patch.setattr(queue_module, "_worker", lambda: {**here, "host": "elsewhere"})
            tasks = queue.claim(1, 1)
            start, real = time.time(), time.time
            patch.setattr(time, "time", lambda: real() + GRACE + 10)
            with queue.holding(tasks):
                while queue._study.user_attrs[queue_module._key(queue_module._worker())] < start + GRACE:
                    time.sleep(0.02)
                assert make_queue().claim(1, 1) == []
                finish_all(queue, tasks)

    def test_a_nan_is_a_result(self, make_queue: Callable[..., Queue]) -> None:
        """Optuna fails a trial whose value is NaN; its task was then claimed again and again."""
        queue = make_queue()
        (task,) = queue.claim(1, 1)
        queue.finish(task, [math.nan])
        assert queue.claim(1, 1) == []
        assert queue.results()[0].values == [math.inf]

    def test_a_task_that_fails_is_free_again(self, make_queue: Callable[..., Queue]) -> None:
        queue = make_queue()
        tasks = queue.claim(2, 2)

        def work() -> None:
            with queue.holding(tasks):
                queue.finish(tasks[0], [0.0])
                raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            work()
        assert [task.index for task in queue.claim(2, 2)] == [1]

    def test_another_search_of_the_same_name_is_refused(self, make_queue: Callable[..., Queue]) -> None:
        make_queue(budget=[3, 3])
        make_queue(budget=[3, 3])
        with pytest.raises(UserError, match=r"'study' is there with another budget: \[3, 3\], not \[4, 4\]"):
            make_queue(budget=[4, 4])

    @pytest.mark.parametrize("change", ["trial_values set value = value + 1", "trial_params set param_value = 1"])
    def test_a_damaged_study_is_not_read(self, change: str, tmp_path: Path) -> None:
        """A database has no checksums: a flipped bit moved what the next layouts were drawn from."""
        url = f"sqlite:///{tmp_path / 'study.db'}"
        letters = {"a": CategoricalDistribution(("L", "G"))}
        queue = Queue(open_storage(url, tmp_path / "lock"), "s", {}, tmp_path / "lock", distributions=letters)
        (task,) = queue.claim(1, 1, lambda *_: {"a": "L"})
        queue.finish(task, [0.5])
        assert list(queue.results()) == [0]
        with closing(sqlite3.connect(tmp_path / "study.db")) as database:
            database.execute(f"update {change}")
            database.commit()
        again = Queue(open_storage(url, tmp_path / "lock"), "s", {}, tmp_path / "lock", distributions=letters)
        with pytest.raises(UserError, match="trial 0 has changed"):
            again.results()

    def test_a_study_that_fails_midway_is_said_in_a_line(self) -> None:
        with pytest.raises(UserError, match="disk is full"), storage_errors():
            raise StorageInternalError("x") from OSError("database or disk is full")

    def test_a_storage_that_cannot_be_opened(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="cannot open the storage nonsense"):
            open_storage("nonsense", tmp_path / "lock")

    @pytest.mark.parametrize("kind", SAMPLERS)
    def test_any_workers_make_the_same_study(self, tmp_path: Path, kind: str) -> None:
        """One worker; or three that take turns, one of which always fails, with results told out of order."""
        density = np.random.default_rng(3).random((6, 3))
        space = Space(make_table(density), (6, 6), 8)

        def study(folder: str, workers: int) -> list[Any]:
            place = tmp_path / folder
            place.mkdir()
            storage = open_storage(f"sqlite:///{place / 'study.db'}", place / "lock")
            queues = [
                Queue(storage, "s", {}, place / "lock", distributions=space.distributions) for _ in range(workers)
            ]
            sampler = Sampler(space, kind, 0, queues[0].directions)
            while len(queues[0].results()) < 35:
                held = [(q, q.claim(35, 2 + i, sampler.point, first_of_generation)) for i, q in enumerate(queues)]
                for number, (queue, tasks) in reversed(list(enumerate(held))):
                    with queue.holding(tasks):
                        for task in tasks if number < 2 else []:
                            queue.finish(task, [-float(density[space.layout(task.params).global_mask].sum())])
            return [(index, trial.params, trial.values) for index, trial in queues[0].results().items()]

        assert study("one", 1) == study("three", 3)
