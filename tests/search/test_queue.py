"""Test the queue of a search: numbered tasks of several workers, some killed, in a study that may be damaged."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from helpers import make_table
from marks import slow_after
from optuna.exceptions import StorageInternalError

from spkv_nas.base.errors import UserError
from spkv_nas.search import queue as queue_module
from spkv_nas.search.queue import GRACE, Queue
from spkv_nas.search.registry import SAMPLERS
from spkv_nas.search.space import Space
from spkv_nas.search.storage import Storage, storage_errors
from spkv_nas.search.study_sampler import StudySampler
from spkv_nas.search.trials import Result


@pytest.fixture
def make_queue(tmp_path: Path) -> Callable[..., Queue]:
    storage = Storage(f"sqlite:///{tmp_path / 'study.db'}", tmp_path / "lock")

    def make(**settings: Any) -> Queue:
        return Queue(storage, "study", settings)

    return make


def finish_all(queue: Queue, tasks: list[int]) -> None:
    for task in tasks:
        queue.finish(task, [float(task)])


def elsewhere(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Pretend that this process is another one."""
    here = replace(queue_module.Worker.current(), **changes)
    monkeypatch.setattr(queue_module.Worker, "current", lambda: here)


class TestQueue:
    def test_tasks_come_in_order_and_once(self, make_queue: Callable[..., Queue]) -> None:
        one, other = make_queue(), make_queue()
        first, second, third = one.claim(5, 2), other.claim(5, 2), one.claim(5, 2)
        assert [first, second, third] == [[0, 1], [2, 3], [4]]
        assert other.claim(5, 2) == []
        finish_all(other, second)
        finish_all(one, [*first, *third])
        assert one.results() == other.results() == {i: Result("", [float(i)]) for i in range(5)}

    def test_every_worker_gets_its_share(self, make_queue: Callable[..., Queue]) -> None:
        queues = [make_queue() for _ in range(4)]
        assert [len(queue.claim(10, 5)) for queue in queues] == [3, 2, 2, 1]
        assert len(make_queue().claim(100, 5, lambda index: index - index % 10)) == 1  # of what may begin

    def test_a_generation_waits_for_the_one_before(self, make_queue: Callable[..., Queue]) -> None:
        queue = make_queue()

        def before(index: int) -> int:
            return index - index % 2

        first = queue.claim(4, 3, before)
        assert first == [0, 1]
        assert queue.claim(4, 3, before) == []
        finish_all(queue, first[1:])
        assert queue.claim(4, 3, before) == []
        finish_all(queue, first[:1])
        assert queue.claim(4, 3, before) == [2, 3]

    def test_tasks_of_a_dead_process_are_released(
        self, make_queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        queue = make_queue()
        with monkeypatch.context() as patch:
            elsewhere(patch, process=gone.pid)
            late = make_queue()
        lost = late.claim(3, 1)
        again = queue.claim(3, 3)
        assert again == [0, 1, 2]
        finish_all(queue, again)
        late.finish(lost[0], [99.0])  # it was alive after all, too late
        assert [result.values[0] for result in make_queue().results().values()] == [0.0, 1.0, 2.0]

    def test_claims_of_another_machine_are_kept(
        self, make_queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        queue = make_queue()
        with monkeypatch.context() as patch:
            elsewhere(patch, host="elsewhere")
            make_queue().claim(1, 1)
        assert queue.claim(1, 1) == []
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + GRACE + 10)
        assert queue.claim(1, 1) == [0]

    def test_signs_of_life_keep_tasks(self, make_queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(queue_module, "HEARTBEAT", 0.05)
        other = make_queue()
        with monkeypatch.context() as patch:
            elsewhere(patch, host="elsewhere")
            queue = make_queue()
        tasks = queue.claim(1, 1)
        start, real = time.time(), time.time
        monkeypatch.setattr(time, "time", lambda: real() + GRACE + 10)
        with queue.holding(tasks):
            while other._others()[0].seen < start + GRACE:
                time.sleep(0.02)
            assert other.claim(1, 1) == []
            finish_all(queue, tasks)

    def test_a_nan_is_a_result(self, make_queue: Callable[..., Queue]) -> None:
        """Optuna fails a trial whose value is NaN; its task is not claimed again."""
        queue = make_queue()
        queue.finish(queue.claim(1, 1)[0], [math.nan])
        assert queue.claim(1, 1) == []
        assert make_queue().results()[0].values == [math.inf]

    def test_a_task_that_fails_is_free_again(self, make_queue: Callable[..., Queue]) -> None:
        queue = make_queue()
        tasks = queue.claim(2, 2)

        def work() -> None:
            with queue.holding(tasks):
                queue.finish(tasks[0], [0.0])
                raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            work()
        assert make_queue().claim(2, 2) == [1]

    def test_another_search_of_the_same_name_is_refused(self, make_queue: Callable[..., Queue]) -> None:
        make_queue(budget=[3, 3])
        make_queue(budget=[3, 3])
        with pytest.raises(UserError, match=r"'study' exists with another budget: \[3, 3\], not \[4, 4\]"):
            make_queue(budget=[4, 4])

    @pytest.mark.parametrize(
        "change",
        [
            "trial_values set value = value + 1",
            "trial_user_attributes set value_json = '\"GL\"' where key = 'point'",
            "trial_user_attributes set value_json = 1 where key = 'index'",
            "trial_user_attributes set value_json = 'true' where key = 'stopped'",
            "trial_user_attributes set key = 'p' where key = 'point'",
            "trial_user_attributes set value_json = '\"LG' where key = 'point'",
        ],
    )
    def test_a_damaged_study_is_refused(self, change: str, tmp_path: Path, make_queue: Callable[..., Queue]) -> None:
        """A database has no checksums; a changed trial is a user error."""
        queue = make_queue()
        queue.finish(queue.claim(1, 1)[0], [0.5], "LG")
        assert make_queue().results() == {0: Result("LG", [0.5])}
        with closing(sqlite3.connect(tmp_path / "study.db")) as database:
            assert database.execute(f"update {change}").rowcount == 1
            database.commit()
        with pytest.raises(UserError, match=r"trial 0 has changed|cannot be read.*\nif its file is damaged"):
            make_queue().results()

    def test_a_study_of_another_version_is_refused(
        self, make_queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(queue_module, "FORMAT", 1)
            make_queue()
        with pytest.raises(UserError, match="'study' was created by another version of spkv-nas"):
            make_queue()

    def test_optuna_sees_the_results(self, tmp_path: Path, make_queue: Callable[..., Queue]) -> None:
        """Its dashboard works, for example."""
        queue = make_queue()
        for task, value in zip(queue.claim(2, 2), (2.0, 1.0), strict=True):
            queue.finish(task, [value], f"L{task}")
        study = optuna.load_study(study_name="study", storage=f"sqlite:///{tmp_path / 'study.db'}")
        assert study.metric_names == ["value"]
        assert study.best_value == 1.0
        assert study.best_trial.user_attrs["point"] == "L1"
        assert [trial.value for trial in study.trials] == [2.0, 1.0]

    def test_a_study_that_fails_midway_is_reported_in_one_line(self) -> None:
        with pytest.raises(UserError, match="disk is full"), storage_errors():
            raise StorageInternalError("x") from OSError("database or disk is full")

    def test_a_storage_that_cannot_be_opened(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="cannot open the storage nonsense"):
            Storage("nonsense", tmp_path / "lock")

    def test_the_driver_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "psycopg", None)
        with pytest.raises(UserError, match=r"psycopg is not installed\npip install 'spkv-nas\[postgresql\]'"):
            Storage("postgresql://me@localhost/x", tmp_path / "lock")

    @pytest.mark.parametrize("generation", [10, 16])
    @pytest.mark.parametrize("kind", slow_after(2, SAMPLERS.names))
    def test_any_workers_make_the_same_study(self, tmp_path: Path, kind: str, generation: int) -> None:
        """One worker, or three that alternate, one of which always fails, with results out of order."""
        density = np.random.default_rng(3).random((6, 3))
        space = Space(make_table(density), (6, 6), 8)

        def study(folder: str, workers: int) -> dict[int, Result]:
            directory = tmp_path / folder
            directory.mkdir()
            storage = Storage(f"sqlite:///{directory / 'study.db'}", directory / "lock")
            queues = [Queue(storage, "s", {}) for _ in range(workers)]
            sampler = StudySampler(space, SAMPLERS[kind], 0, trials_per_round=generation)
            while len(results := queues[0].results()) < 35:
                held = [(queue, queue.claim(35, 2 + i, sampler.first_of_round)) for i, queue in enumerate(queues)]
                for number, (queue, tasks) in reversed(list(enumerate(held))):
                    with queue.holding(tasks):
                        for task in tasks if number < 2 else []:
                            layout = sampler.layout(task, [results[i] for i in range(sampler.first_of_round(task))])
                            value = -float(density[layout.global_mask].sum())
                            queue.finish(task, [value], space.point(layout))
            return results

        assert study("one", 1) == study("three", 3)
