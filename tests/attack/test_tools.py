"""Test the attack's tools: they must detect planted faults."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from attack.arena import Arena
from attack.commands import COMMANDS
from attack.compare import differences, snapshot
from attack.faults import Faults, environment, read_operations
from attack.tally import Tally

WRITERS = """
import os, sqlite3, sys, pathlib, shutil
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
place = pathlib.Path(sys.argv[1])
failed = []
def attempt(name, write):
    try:
        write()
    except Exception as error:
        failed.append(name)
def database():
    with sqlite3.connect(place / "sqlite") as connection:
        connection.execute("create table numbers (n)")
        connection.executemany("insert into numbers values (?)", [(i,) for i in range(2000)])
attempt("python", lambda: (place / "python").write_bytes(bytes(5000)))
attempt("safetensors", lambda: save_file({"a": torch.zeros(5000)}, place / "safetensors"))
tokenizer = Tokenizer(models.BPE({f"{i}": i for i in range(5000)}, []))
attempt("tokenizers", lambda: tokenizer.save(str(place / "tokenizers")))
attempt("torch", lambda: torch.save(torch.zeros(5000), place / "torch"))
attempt("sqlite", database)
attempt("copy", lambda: shutil.copy(sys.executable, place / "copy"))
attempt("rename", lambda: os.replace(place / "python", place / "renamed"))
attempt("remove", lambda: shutil.rmtree(place / "folder"))
print(" ".join(failed))
"""
FILES = {"python", "safetensors", "tokenizers", "torch", "sqlite", "copy"}


def write_all(
    arena: Arena, folder: Path, **faults: int
) -> tuple[subprocess.CompletedProcess[str], Path]:
    (folder / "folder" / "deep").mkdir(parents=True)
    (folder / "folder" / "deep" / "file").touch()
    log = folder.with_suffix(".log")
    armed = Faults(folder, log=str(log), **faults).environment(arena.library)
    completed = subprocess.run(
        [sys.executable, "-c", WRITERS, folder],
        env={**environment(), **armed},
        capture_output=True,
        text=True,
        check=False,
    )
    return completed, log


def test_every_writer_is_seen(arena: Arena, tmp_path: Path) -> None:
    """Trace Python, Rust (safetensors, tokenizers), C++ (torch) and SQLite; renames and removals below folders."""
    done, log = write_all(arena, tmp_path / "place")
    assert done.stdout.split() == [], done.stderr
    seen = {(operation.what, operation.path) for operation in read_operations(log)}
    # Then renamed by a raw system call
    names = {"safetensors": next(name for _, name in seen if name.startswith(".tmp"))}
    assert {("open", names.get(name, name)) for name in FILES} <= seen
    assert {("write", names.get(name, name)) for name in FILES - {"copy"}} <= seen
    assert {("write", "copy"), ("copy", "copy")} & seen
    assert ("rename to", "renamed") in seen
    removed = {path for what, path in seen if what in ("unlink", "rmdir")}
    assert any(path.endswith("file") for path in removed)
    assert ("fsync", "sqlite") in seen


def test_a_full_disk_reaches_every_writer(arena: Arena, tmp_path: Path) -> None:
    done, _ = write_all(arena, tmp_path / "place", full_after=100)
    assert set(done.stdout.split()) >= FILES, done.stderr
    assert (
        sum(path.stat().st_size for path in (tmp_path / "place").iterdir() if path.is_file()) == 100
    )


def test_a_kill_comes_before_the_operation(arena: Arena, tmp_path: Path) -> None:
    _, log = write_all(arena, tmp_path / "one")
    point = next(o for o in read_operations(log) if (o.what, o.path) == ("write", "torch"))
    done, _ = write_all(arena, tmp_path / "two", kill_at=point.number)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "two" / "torch").stat().st_size == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_undisturbed_runs_agree(
    name: str, arena: Arena, attack: Callable[[str], AbstractContextManager[Tally]]
) -> None:
    """Check that a second undisturbed run, and one over the finished result, give the same files."""
    command = COMMANDS[name]
    with attack(f"undisturbed {name}") as tally:
        expected = arena.expected(command)
        (round_, *_) = arena.rounds(tally, 1)
        round_.note("rounds")
        arena.reset(command.start)
        run = arena.run(command)
        if run.status != 0 or (wrong := arena.differences(expected)):
            round_.fail(
                "differed", "undisturbed, a second time", run, wrong if run.status == 0 else None
            )
        if command.once:
            return
        arena.reset(expected.state)
        run = arena.run(command)
        if run.status != 0 or (wrong := arena.differences(expected)):
            round_.fail(
                "differed",
                "undisturbed, over its own result",
                run,
                wrong if run.status == 0 else None,
            )


def test_a_difference_is_detected(arena: Arena) -> None:
    expected = arena.expected(COMMANDS["train"])
    arena.reset(expected.state)
    assert not arena.differences(expected)
    victim = next(arena.ground.glob("w/runs/tiny/dense-*/final/model.safetensors"))
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    (arena.ground / "w" / "extra.csv").touch()
    wrong = arena.differences(expected)
    assert [line.split()[0] for line in wrong] == ["differs", "extra"]
    assert differences(snapshot(arena.ground), expected.files)
