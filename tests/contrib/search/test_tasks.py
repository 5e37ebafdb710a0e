"""Test how the tasks of a study are divided among workers: each once, and those of dead ones again."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import Trial, TrialState

from spkv_nas.base.errors import UserError
from spkv_nas.contrib.search import storage as storage_module
from spkv_nas.contrib.search.storage import (
    INDEX,
    finished,
    open_storage,
    open_study,
    storage_errors,
    work,
)

_WORKER = """
import sys, time
from spkv_nas.contrib.search import storage
storage.HEARTBEAT, storage.GRACE = 1, 2
study = storage.open_study(storage.open_storage(sys.argv[1]), "study", {}, ["value"])
def run(trial, index):
    if sys.argv[2] == "dies":
        print("ready", flush=True)
        time.sleep(600)
    time.sleep(0.05)
    return [float(index)]
storage.work(study, 20, run)
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture
def make_study(url: str) -> Callable[..., optuna.Study]:
    return lambda **settings: open_study(open_storage(url), "study", settings, ["value"])


def value(trial: Trial, index: int) -> list[float]:
    return [float(index)]


def test_tasks_run_in_order_and_once(make_study: Callable[..., optuna.Study]) -> None:
    ran: list[int] = []

    def run(trial: Trial, index: int) -> list[float]:
        ran.append(index)
        return value(trial, index)

    seen: list[tuple[int, int]] = []
    done = work(make_study(), 4, run, lambda *count: seen.append(count))
    assert ran == list(done) == [0, 1, 2, 3]
    assert [trial.value for trial in done.values()] == [0.0, 1.0, 2.0, 3.0]
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert list(work(make_study(), 2, run)) == [0, 1]  # fewer than before
    assert list(work(make_study(), 6, run)) == [0, 1, 2, 3, 4, 5]
    assert ran == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_task_that_fails_is_free_again(
    make_study: Callable[..., optuna.Study], error: BaseException
) -> None:
    def run(trial: Trial, index: int) -> list[float]:
        if index == 1:
            raise error
        return value(trial, index)

    with pytest.raises(type(error)):
        work(make_study(), 3, run)
    assert list(finished(make_study(), 3)) == [0]
    assert [trial.value for trial in work(make_study(), 3, value).values()] == [0.0, 1.0, 2.0]


def test_workers_share_the_tasks_and_those_of_a_dead_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes and this one; a fourth holds a task when it is killed."""
    monkeypatch.setattr(storage_module, "HEARTBEAT", 1)
    monkeypatch.setattr(storage_module, "GRACE", 2)
    run = [sys.executable, "-c", _WORKER, url]
    dead = subprocess.Popen([*run, "dies"], stdout=subprocess.PIPE)
    assert dead.stdout is not None
    assert dead.stdout.readline() == b"ready\n"
    dead.kill()
    dead.communicate()
    workers = [subprocess.Popen([*run, "lives"]) for _ in range(2)]
    study = open_study(open_storage(url), "study", {}, ["value"])
    done = work(study, 20, lambda trial, index: [float(index), time.sleep(0.05)][:1])
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert [trial.value for trial in done.values()] == [float(index) for index in range(20)]
    states = [(trial.state, trial.user_attrs.get(INDEX)) for trial in study.trials]
    assert states[0] == (TrialState.FAIL, 0)
    complete = [index for state, index in states if state == TrialState.COMPLETE]
    assert len(complete) <= 21  # two workers that saw the same free task are rare


def test_a_task_is_taken_with_a_heartbeat(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna's thread beats later: a worker that was killed before held its task forever, and all others waited."""
    monkeypatch.setattr(
        "optuna.storages._heartbeat.HeartbeatThread._record_heartbeat", lambda *_: None
    )
    study, beats = open_study(open_storage(url), "study", {}, ["value"]), list[int]()

    def run(trial: Trial, index: int) -> list[float]:
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            beats.append(connection.execute("select count(*) from trial_heartbeats").fetchone()[0])
        return value(trial, index)

    work(study, 2, run)
    assert beats == [1, 2]


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_round_waits_for_the_one_before(make_study: Callable[..., optuna.Study]) -> None:
    study, started = make_study(), list[tuple[int, int]]()

    def run(trial: Trial, index: int) -> list[float]:
        started.append((index, len(finished(study, 6))))
        if index == 1 and len(started) == 2:
            raise KeyboardInterrupt
        return value(trial, index)

    with pytest.raises(KeyboardInterrupt):
        work(study, 6, run, num_prior=lambda index: index - index % 3)
    open_trial = study.ask()
    open_trial.set_user_attr(INDEX, 1)  # as of another worker
    assert storage_module._free(study.trials, 6, lambda index: index - index % 3) == [2]
    study.tell(open_trial, 1.0)
    work(study, 6, run, num_prior=lambda index: index - index % 3)
    assert [(index, count) for index, count in started if index >= 3] == [(3, 3), (4, 4), (5, 5)]


def test_a_worker_that_was_held_for_dead_goes_on(make_study: Callable[..., optuna.Study]) -> None:
    """Another worker has failed its trial meanwhile, and the task is run again."""
    study, ran = make_study(), list[int]()

    def run(trial: Trial, index: int) -> list[float]:
        ran.append(index)
        if len(ran) == 1:
            study.tell(trial.number, state=TrialState.FAIL)
        return value(trial, index)

    assert list(work(study, 2, run)) == [0, 1]
    assert ran == [0, 0, 1]


def test_layouts_behind_the_median_are_pruned(make_study: Callable[..., optuna.Study]) -> None:
    reports = [1.0, 4.0, 2.0, 3.0, 2.0, 2.6, 9.0]

    def run(trial: Trial, index: int) -> list[float]:
        trial.report(reports[index], 0)
        if trial.should_prune():
            raise optuna.TrialPruned
        return [reports[index]]

    done = work(make_study(), 7, run)
    pruned = [index for index, trial in done.items() if trial.state == TrialState.PRUNED]
    assert pruned == [5, 6]  # the first four never; then the median is 2.5 and 2


def test_another_search_of_the_same_name_is_refused(
    make_study: Callable[..., optuna.Study],
) -> None:
    make_study(budget=[3, 3])
    make_study(budget=[3, 3])
    with pytest.raises(
        UserError, match=r"'study' exists with another budget: \[3, 3\], not \[4, 4\]"
    ):
        make_study(budget=[4, 4])


def test_optuna_sees_the_results(url: str, make_study: Callable[..., optuna.Study]) -> None:
    """Its dashboard works, for example."""
    work(make_study(), 2, value)
    study = optuna.load_study(study_name="study", storage=url)
    assert study.metric_names == ["value"]
    assert (study.best_value, study.best_trial.user_attrs) == (0.0, {INDEX: 0})


def test_a_study_that_fails_midway_is_reported_in_one_line() -> None:
    with pytest.raises(UserError, match="disk is full"), storage_errors():
        raise StorageInternalError("x") from OSError("database or disk is full")


def test_a_storage_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot open the storage nonsense"):
        open_storage("nonsense")
    (tmp_path / "study.db").write_bytes(b"no database" * 500)
    with pytest.raises(UserError, match="if its file is damaged, remove it"):
        open_storage(f"sqlite:///{tmp_path / 'study.db'}")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(
        UserError, match=r"psycopg is not installed\npip install 'spkv-nas\[postgresql\]'"
    ):
        open_storage("postgresql://me@localhost/x")
