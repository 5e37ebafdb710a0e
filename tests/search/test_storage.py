"""Test a search over a PostgreSQL server: workers in separate folders, as on several machines, and a server stop.

A real server, of the programs and the driver that are installed; without them there is nothing to try.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import RECIPE, write_project

from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.search.queue import Queue
from spkv_nas.search.storage import Storage, storage_errors

psycopg = pytest.importorskip("psycopg")

_AS_OTHER: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
_WORKER = """
import socket, sys
socket.gethostname = lambda: sys.argv[1]
from spkv_nas.cli import main
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
            self._process = subprocess.Popen(self._start, cwd=self._data.parent, stderr=log, **_AS_OTHER)
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
    recipe = write_project(folder / "project", RECIPE.replace("num_hidden_layers: 2", "num_hidden_layers: 5"))
    probe = folder / "workspace" / "probes" / "tiny"
    probe.mkdir(parents=True)
    density = np.random.default_rng(0).random((5, 2)).round(3)
    lines = [f"{layer},{head},{density[layer, head]}" for layer, head in np.ndindex(5, 2)]
    (probe / "density.csv").write_text("layer,kv_head,density\n" + "\n".join(lines) + "\n")
    return [
        "search",
        "--recipe",
        str(recipe),
        "--workspace",
        str(folder / "workspace"),
        "--probe",
        "tiny",
        "--window",
        "4",
        "--max-tokens",
        "1280",
        "--budget",
        "4",
        "--trials",
        "20",
        "--seeds",
        "2",
        "--num-short",
        "0",
    ]


def table(folder: Path) -> bytes:
    return (folder / "workspace" / "reports" / "tiny" / "search.csv").read_bytes()


DONE = """select study_id, value_json::int from trials join trial_user_attributes using (trial_id)
          where state = 'COMPLETE' and key = 'index'"""
CLAIMS = "select study_id, value_json from study_user_attributes where key like 'worker %'"


def unfinished(server: Server, machine: str) -> list[tuple[int, int]]:
    """Return the trials that a machine's worker has claimed and not finished."""
    done = server.rows(DONE)
    claims = [(study, json.loads(claim)) for study, claim in server.rows(CLAIMS)]
    held = [(study, task) for study, claim in claims if claim["host"].startswith(machine) for task in claim["tasks"]]
    return [task for task in held if task not in done]


def stopped_at(server: Server, one: subprocess.Popen[bytes]) -> list[tuple[int, int]]:
    """Stop machine one's worker and return its unfinished trials; let it continue if there are none."""
    if not unfinished(server, "one"):
        return []
    one.send_signal(signal.SIGSTOP)
    lost = unfinished(server, "one")
    if not lost:
        one.send_signal(signal.SIGCONT)
    return lost


@pytest.mark.slow
def test_one_of_three_machines_is_lost(server: Server, tmp_path: Path) -> None:
    """Three workers start at once in an empty database."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    names = ["one", "two", "three"]
    searches = {name: [*project(tmp_path / name), "--storage", server.url] for name in names}
    workers = {}
    for name, search in searches.items():
        with (tmp_path / f"{name}.log").open("w") as log:
            run = [sys.executable, "-c", _WORKER, name, *search]
            workers[name] = subprocess.Popen(run, env=environment, stdout=log, stderr=subprocess.STDOUT)
    logs = {name: tmp_path / f"{name}.log" for name in names}
    one = workers["one"]
    try:
        while not (lost := stopped_at(server, one)):
            assert one.poll() is None, logs["one"].read_text()[-2000:]
            time.sleep(0.02)
        one.kill()
        server.rows(  # its last sign of life was long ago
            """update study_user_attributes set value_json = jsonb_set(value_json::jsonb, '{seen}', '0')::text
               where key like 'worker %' and value_json::jsonb ->> 'host' like 'one %'"""
        )
        for name in names[1:]:
            assert workers[name].wait(300) == 0, logs[name].read_text()[-2000:]
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    done = server.rows(DONE)
    assert set(lost) <= set(done)
    assert len(done) == len(set(done)) == 80  # two samplers, two seeds; none twice
    main(project(tmp_path / "alone"))
    assert table(tmp_path / "two") == table(tmp_path / "three") == table(tmp_path / "alone")


@pytest.mark.slow
def test_a_restarted_server_and_a_lost_one(server: Server, tmp_path: Path) -> None:
    storage = Storage(server.url, tmp_path / "lock")
    try:
        queue = Queue(storage, "study", {})
        queue.finish(queue.claim(3, 1)[0], [1.0])
        server.stop()
        server.start()
        assert queue.claim(3, 1) == [1]
        server.stop()
        with (
            pytest.raises(UserError, match=r"cannot be read or written.*\nrun the same command again"),
            storage_errors(),
        ):
            queue.claim(3, 1)
        server.start()
        assert Queue(storage, "study", {}).claim(3, 3) == [2]  # the other is still this process's
    finally:
        storage.studies.engine.dispose()


def test_a_missing_server(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot open the storage") as error:
        Storage(f"postgresql://me:secret@/x?host={tmp_path}", tmp_path / "lock")
    assert "secret" not in str(error.value)
