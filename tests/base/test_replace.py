"""Test that results stay consistent: files that change together, their records, and names that stay in their folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from spkv_nas.base.errors import MAX_CHARACTERS, UserError
from spkv_nas.base.interrupt import deferred, raising
from spkv_nas.base.names import check_name
from spkv_nas.base.records import read_record, write_record
from spkv_nas.base.replace import new_folder, replacing, settle
from spkv_nas.base.workspace import Workspace


def write(folder: Path, content: str, *, with_heads: bool = True) -> None:
    """Write a result of two tables, one of which is optional, and a record."""
    with replacing(folder, ["heads.csv"]) as new:
        (new / "table.csv").write_text(content)
        if with_heads:
            (new / "heads.csv").write_text(content)
        write_record(new / "table.yaml", {"content": content})


def read(folder: Path) -> dict[str, str]:
    """Return the files of a result by name, as a user sees them in the folder."""
    settle(folder)
    return {
        file.name: file.read_text() for file in folder.iterdir() if not file.name.startswith(".")
    }


class Killed(BaseException):
    pass


class TestReplacing:
    def test_other_files_stay_and_stale_ones_go(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("mine")
        write(tmp_path, "old")
        write(tmp_path, "new", with_heads=False)
        result = read(tmp_path)
        assert result.keys() == {"mine.txt", "table.csv", "table.yaml"}
        assert result["table.csv"] == "new"

    def test_killed_anywhere_files_are_all_old_or_all_new(self, tmp_path: Path) -> None:
        """A threshold never stands beside densities of another one. The last run is not killed."""
        for name in ("old", "new"):
            write(tmp_path / name, name, with_heads=name == "old")
        for number in count():
            folder = tmp_path / f"result-{number}"
            write(folder, "old")
            is_killed = self.is_killed_after(number, folder)
            assert read(folder) in (read(tmp_path / "old"), read(tmp_path / "new"))
            write(folder, "new", with_heads=False)
            assert read(folder) == read(tmp_path / "new")
            if not is_killed:
                break
        assert number > 10

    def is_killed_after(self, number: int, folder: Path) -> bool:
        """Write the new files, unless they take more than a number of operations: then raise at the next one."""
        operations = 0

        def watched(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                nonlocal operations
                operations += 1
                if operations > number:
                    raise Killed
                return original(*args, **options)

            return run

        with pytest.MonkeyPatch.context() as patch:
            for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
                patch.setattr(os, name, watched(getattr(os, name)))
            with suppress(Killed):
                write(folder, "new", with_heads=False)
        return operations > number

    def test_abandoned_files_are_removed_after_a_day(self, tmp_path: Path) -> None:
        for name in (".new-old", ".new-young"):
            (tmp_path / name).mkdir()
        os.utime(tmp_path / ".new-old", (0, 0))
        write(tmp_path, "new")
        assert {path.name for path in tmp_path.glob(".new-*")} == {".new-young"}

    def test_an_error_leaves_the_old_result(self, tmp_path: Path) -> None:
        write(tmp_path, "old")
        with pytest.raises(FileNotFoundError), replacing(tmp_path) as new:
            ((new / "table.csv").write_text("new"), (new / "nowhere" / "x").write_text(""))
        assert read(tmp_path)["table.csv"] == "old"

    def test_a_workspace_completes_interrupted_replacements(self, tmp_path: Path) -> None:
        commit = tmp_path / "probes" / "p" / ".commit"
        commit.mkdir(parents=True)
        (commit / "density.csv").write_text("new")
        (commit / ".stale.json").write_text('["../../escape.csv"]')
        (tmp_path / "escape.csv").write_text("mine")
        folder = Workspace(tmp_path).probe_dir("p")
        assert (folder / "density.csv").read_text() == "new"
        assert not commit.exists()
        assert (tmp_path / "escape.csv").exists()


class TestNewFolder:
    def test_a_folder_is_complete_or_absent(self, tmp_path: Path) -> None:
        final = tmp_path / "final"
        with pytest.raises(FileNotFoundError), new_folder(final) as new:
            ((new / "half").write_text(""), (new / "nowhere" / "x").write_text(""))
        assert not list(tmp_path.iterdir())
        final.mkdir()
        (final / "half").write_text("of an earlier attempt")
        with new_folder(final) as new:
            (new / "whole").write_text("")
        assert [file.name for file in final.iterdir()] == ["whole"]

    def test_two_processes_write_folders_of_their_own(self, tmp_path: Path) -> None:
        """They shared one temporary folder, which the second removed while the first wrote there."""
        final = tmp_path / "final"
        with new_folder(final) as first:
            (first / "one").write_text("first")
            with new_folder(final) as second:
                (second / "one").write_text("second")
                (second / "two").write_text("second")
            assert (first / "one").read_text() == "first"
            assert {file.name for file in final.iterdir()} == {"one", "two"}
        assert [file.name for file in final.iterdir()] == ["one"]
        assert [path.name for path in tmp_path.iterdir()] == ["final"]

    def test_the_first_of_two_stays_where_none_is_replaced(self, tmp_path: Path) -> None:
        final = tmp_path / "final"
        final.mkdir()  # without files

        def write_late() -> None:
            with new_folder(final, replaces=False) as late:
                (late / "one").write_text("late")
                with new_folder(final, replaces=False) as first:
                    (first / "one").write_text("first")

        with pytest.raises(
            UserError,
            match="final was written by another process in the meantime, and is left as it",
        ):
            write_late()
        assert (final / "one").read_text() == "first"
        assert [path.name for path in tmp_path.iterdir()] == ["final"]

    def test_what_a_killed_process_left_is_removed(self, tmp_path: Path) -> None:
        """Unlike the folder of a process that goes on, or one of a similar name."""
        killed = tmp_path / ".final.partial-0"
        killed.mkdir()
        (killed / "weights").write_text("half")
        killed.with_name(f"{killed.name}.lock").write_text("")
        with new_folder(tmp_path / "final-2") as other, new_folder(tmp_path / "final") as new:
            assert not killed.exists()
            assert other.exists()
            (new / "whole").write_text("")
        assert {path.name for path in tmp_path.iterdir()} == {"final", "final-2"}

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with (
            pytest.raises(UserError, match="cannot write"),
            new_folder(tmp_path / "file" / "final"),
        ):
            pass


class TestRecords:
    @pytest.mark.parametrize("name", ["table.csv", "table.yaml"])
    def test_a_change_by_hand_is_read_with_a_warning(self, name: str, tmp_path: Path) -> None:
        write(tmp_path, "old")
        file = tmp_path / name
        file.write_text(file.read_text().replace("old", "mine", 1))
        with pytest.warns(UserWarning, match=f"{name}: edited or damaged after it was written"):
            read_record(tmp_path / "table.yaml", "record")

    def test_a_binary_file_that_changed_is_damaged(self, tmp_path: Path) -> None:
        (tmp_path / "counts.npz").write_bytes(b"1")
        write_record(tmp_path / "record.yaml", {"a": 1})
        assert read_record(tmp_path / "record.yaml", "record") == {"a": 1}
        (tmp_path / "counts.npz").write_bytes(b"2")
        with pytest.raises(UserError, match=r"counts.npz is damaged"):
            read_record(tmp_path / "record.yaml", "record")

    def test_a_truncated_record_is_not_one_without_hashes(self, tmp_path: Path) -> None:
        """A record that lacks its last lines is refused."""
        write(tmp_path, "old")
        file = tmp_path / "table.yaml"
        text = file.read_text()
        for length in range(len(text)):
            file.write_text(text[:length])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    read_record(file, "record")
                except UserError:
                    continue
            assert ["table.yaml" in str(one.message) for one in caught] == [True], text[:length]

    def test_a_record_without_hashes_is_read_unchecked(self, tmp_path: Path) -> None:
        (tmp_path / "record.yaml").write_text("a: 1\n")
        assert read_record(tmp_path / "record.yaml", "record") == {"a": 1}


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "",
            "..",
            ".hidden",
            "/abs",
            "a/b",
            "../../evil",
            "a\\b",
            "a\0b",
            "a\nb",
            " a",
            "a ",
            "x" * 300,
            "ü" * 95,
            "\x1b[2J",
        ],
    )
    def test_names_that_leave_the_folder_are_refused(self, name: str) -> None:
        with pytest.raises(UserError, match=r"strategy .* cannot name a file"):
            check_name(name, "strategy")

    @pytest.mark.parametrize(
        "name", ["stdlib-21x3", "Llama 3.1 8B", "modèle", "a..b", "densest-18", "x" * 100]
    )
    def test_other_text_is_a_name(self, name: str) -> None:
        assert check_name(name, "strategy") == name


def test_file_contents_neither_flood_nor_control_the_terminal() -> None:
    message = str(UserError("found '\x1b[2J" + "x" * 70_000 + "'\nlast line"))
    assert len(message) <= MAX_CHARACTERS
    assert "\x1b" not in message
    assert message.endswith("'\nlast line")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_a_command_with_one_line(name: str, code: int, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from spkv_nas.cli import app\n"
        f"signal.signal(signal.{name}, signal.SIG_DFL)\n"  # tests may run where a shell ignores it
        "import spkv_nas.stages.layout as stage\n"
        f"stage.read_layout = lambda *arguments: os.kill(os.getpid(), signal.{name})\n"
        "app.main(['layout', 'show', 'x.yaml'])\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert completed.returncode == code
    assert completed.stderr == f"interrupted by {name}: run the same command again to resume\n"


def test_signals_ignored_by_the_shell_stay_ignored() -> None:
    """As under nohup, or in a background job."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raising(), deferred() as pending:
            os.kill(os.getpid(), signal.SIGHUP)
        assert pending.number is None
    finally:
        signal.signal(signal.SIGHUP, before)
