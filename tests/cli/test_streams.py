"""Test commands whose output goes to a closed pipe, a closed stream, or a stream that cannot encode it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from marks import slow, slow_after

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import console

PLAN = ("plan", "attention", "micro-0", "--context", "1k")  # prints µs
SHOW = ("layout", "show", "layout.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with a layout."""
    Layout(("GL", "LL"), 8, "mixed").write(tmp_path / "layout.yaml")
    return tmp_path


def run(
    folder: Path,
    *arguments: str,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    encoding: str = "utf-8",
) -> subprocess.CompletedProcess[bytes]:
    """Run a command in its own process."""
    return subprocess.run(
        [sys.executable, "-m", "spkv_nas", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        stdout=stdout,
        stderr=stderr,
        check=False,
    )


@pytest.fixture
def no_reader() -> Iterator[int]:
    """Return the writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize("arguments", [SHOW, slow(((*SHOW, "--json"),))], ids=["text", "json"])
def test_a_reader_that_ended_is_no_answer(
    folder: Path, no_reader: int, arguments: tuple[str, ...]
) -> None:
    """``spkv-nas auto ... | head -1`` exited with 1, by which it says that no layout passes."""
    ended = run(folder, *arguments, stdout=no_reader)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_an_error_keeps_its_exit_code_without_a_reader(folder: Path, no_reader: int) -> None:
    assert run(folder, "layout", "show", "none.yaml", stderr=no_reader).returncode == 2


@pytest.mark.parametrize("encoding", slow_after(1, ["ascii", "cp1252"]))
def test_what_an_encoding_lacks_is_escaped(folder: Path, encoding: str) -> None:
    """A finished measurement was lost because µ, Δ or ± could not be printed."""
    printed = run(folder, *PLAN, encoding=encoding)
    assert printed.returncode == 0, printed.stderr
    assert b"\xb5s" in printed.stdout if encoding == "cp1252" else b"\\xb5s" in printed.stdout


def test_json_is_valid_in_ascii(folder: Path) -> None:
    (folder / "layout.yaml").rename(folder / "entwürfe-ř.yaml")
    printed = run(folder, "layout", "show", "entwürfe-ř.yaml", "--json", encoding="ascii:strict")
    assert printed.returncode == 0, printed.stderr
    assert "entwürfe-ř" in str(json.loads(printed.stdout.decode("ascii")))


def test_control_characters_of_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """A file's name could clear the screen, or print a line that looks like a result."""
    name = "a\x1b[2J\x9b31m\nb"
    console.print_path("layout", Path(name))
    console.say(f"probe {name.replace(chr(10), ' ')}")
    table = console.Table("name")
    table.add_row(name)
    console.out.print(table)
    shown = capsys.readouterr().out
    assert "layout: a\\x1b[2J\\x9b31m\\nb\n" in shown
    assert "probe a\\x1b[2J\\x9b31m b\n" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)
