"""Test a search over a PostgreSQL server: workers in separate folders, as on several machines, and a server stop.

A real server, of the programs and the driver that are installed; without them there is nothing to try.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import RECIPE, write_project

from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.contrib.search import storage as storage_of_studies
from spkv_nas.contrib.search.storage import open_storage, open_study, storage_errors, work

psycopg = pytest.importorskip("psycopg")

_AS_OTHER: dict[str, Any] = (
    {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
)
_WORKER = """
import sys
from spkv_nas.cli import main
from spkv_nas.contrib.search import storage
storage.HEARTBEAT, storage.GRACE = 1, 3
main(sys.argv[2:])
"""


class Server:
    """PostgreSQL server behind a socket in ``folder``; it refuses to run as root, so it runs as another user."""

    def __init__(self, folder: Path) -> None:
        self.url = f"postgresql://search@/postgres?host={folder}"
        self._data = folder / "data"
        make = ["initdb", "-D", self._data, "-U", "search", "-A", "trust", "--no-sync"]
        subprocess.run(make, check=True, capture_output=True, cwd=folder, **_AS_OTHER)
        self._start = [
            "postgres",
            "-D",
            self._data,
            "-k",
            folder,
            "-c",
            "listen_addresses=",
            "-c",
            "fsync=off",
        ]
        self.start()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with (self._data.parent / "log").open("a") as log:
            self._process = subprocess.Popen(
                self._start, cwd=self._data.parent, stderr=log, **_AS_OTHER
            )
        while True:
            assert self._process.poll() is None, (self._data.parent / "log").read_text()
            with suppress(psycopg.OperationalError):
                self.rows("select 1")
                return
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server without waiting for its clients."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def rows(self, query: str) -> list[Any]:
        """Return the rows of a query, bypassing Optuna; commit a change."""
        with psycopg.connect(self.url) as connection, suppress(psycopg.errors.UndefinedTable):
            cursor = connection.execute(query)
            return cursor.fetchall() if cursor.description else []
        return []


@pytest.fixture
def server() -> Iterator[Server]:
    if not (shutil.which("postgres") and shutil.which("initdb")):
        pytest.skip("no PostgreSQL server is installed")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # a socket's path is short
        folder = Path(name)
        if _AS_OTHER:
            os.chown(folder, _AS_OTHER["user"], _AS_OTHER["group"])
        server = Server(folder)
        try:
            yield server
        finally:
            server.stop()


def project(folder: Path) -> list[str]:
    """Write a project with a workspace to a new folder; return the arguments of its search."""
    recipe = RECIPE.replace("num_hidden_layers: 2", "num_hidden_layers: 5").replace(
        "window: 8", "window: 4"
    )
    file = write_project(folder / "project", recipe)
    probe = folder / "workspace" / "probes" / "tiny"
    probe.mkdir(parents=True)
    density = np.random.default_rng(0).random((5, 2)).round(3)
    lines = [f"{layer},{head},{density[layer, head]}" for layer, head in np.ndindex(5, 2)]
    (probe / "density.csv").write_text("layer,kv_head,density\n" + "\n".join(lines) + "\n")
    arguments = [
        "search",
        "--recipe",
        str(file),
        "--workspace",
        str(folder / "workspace"),
        "--probe",
        "tiny",
    ]
    return [*arguments, "--max-tokens", "1280", "--budget", "4", "--trials", "30", "--retrain", "0"]


def table(folder: Path) -> bytes:
    return (folder / "workspace" / "reports" / "tiny" / "search.csv").read_bytes()


RUNNING = "select count(*) from trials where state = 'RUNNING'"
DONE = """select value_json::int from trials join trial_user_attributes using (trial_id)
          where state = 'COMPLETE' and key = 'index'"""


@pytest.mark.slow
def test_one_of_three_machines_is_lost(server: Server, tmp_path: Path) -> None:
    """Three workers start at once in an empty database, and one is killed while it holds a trial."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    names = ["one", "two", "three"]
    workers = {}
    for name in names:
        search = [*project(tmp_path / name), "--storage", server.url]
        with (tmp_path / f"{name}.log").open("w") as log:
            run = [sys.executable, "-c", _WORKER, name, *search]
            workers[name] = subprocess.Popen(
                run, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
    logs = {name: tmp_path / f"{name}.log" for name in names}
    try:
        while not server.rows(DONE):
            assert all(worker.poll() is None for worker in workers.values()), logs[
                "one"
            ].read_text()[-2000:]
            time.sleep(0.02)
        workers["one"].kill()
        for name in names[1:]:
            assert workers[name].wait(300) == 0, logs[name].read_text()[-2000:]
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    assert {index for (index,) in server.rows(DONE)} == set(range(30))
    main(project(tmp_path / "alone"))
    assert table(tmp_path / "two") == table(tmp_path / "three") == table(tmp_path / "alone")


@pytest.mark.slow
def test_a_restarted_server_and_a_lost_one(server: Server) -> None:
    storage = open_storage(server.url)
    try:
        study = open_study(storage, "study", {}, ["value"])
        work(study, 1, lambda trial, index: [1.0])
        server.stop()
        server.start()
        assert list(work(study, 2, lambda trial, index: [1.0])) == [0, 1]
        server.stop()
        with (
            pytest.raises(
                UserError, match=r"cannot be read or written.*\nrun the same command again"
            ),
            storage_errors(),
        ):
            work(study, 3, lambda trial, index: [1.0])
        server.start()
    finally:
        storage.engine.dispose()


def test_a_missing_server(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot open the storage") as error:
        open_storage(f"postgresql://me:secret@/x?host={tmp_path}")
    assert "secret" not in str(error.value)


def test_a_trial_whose_worker_died_before_its_first_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna never fails it; it kept the only task that may start from all other trials."""
    monkeypatch.setattr(storage_of_studies, "GRACE", 0.2)
    monkeypatch.setattr(storage_of_studies, "_POLL", 0.05)
    study = open_study(open_storage(f"sqlite:///{tmp_path}/study.db"), "study", {}, ["value"])
    study._storage.create_new_trial(study._study_id)  # what Study.optimize does first
    calls = count()
    done = work(
        study,
        3,
        lambda trial, index: [1.0],
        lambda *_: assert_few(next(calls)),
        lambda index: index,
    )
    assert list(done) == [0, 1, 2]


def assert_few(calls: int) -> None:
    assert calls < 100, "waits for ever"
