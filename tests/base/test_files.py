"""Test that files are read back as they were written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from helpers import make_layouts

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import parse_json, parse_yaml, read_yaml, write_atomic, yaml_text
from spkv_nas.base.replace import new_folder, replacing
from spkv_nas.proposal.foreign_formats import convert


def test_text_stays_text(tmp_path: Path) -> None:
    """A commit such as 1234e5678901 is quoted, so that it is not read back as a number."""
    texts = {
        "commits": ["1e5", "1234e5678901", "12.5e-3", "true", "null", "2024-13-45", "0x1f", "ab: c"]
    }
    (tmp_path / "a.yaml").write_text(yaml_text(texts))
    assert read_yaml(tmp_path / "a.yaml", "test") == texts


def test_a_repeated_list_is_read_again(tmp_path: Path) -> None:
    """The strict reader refuses aliases, so none is written."""
    taus = [0.1, 0.5]
    (tmp_path / "a.yaml").write_text(yaml_text({"one": taus, "other": taus}))
    assert read_yaml(tmp_path / "a.yaml", "test") == {"one": taus, "other": taus}


@pytest.mark.parametrize(
    "number", ["9" * 5000, "9" * 400, "0x" + "f" * 5000, "0b" + "1" * 333, "1" + ":59" * 400]
)
def test_a_number_of_thousands_of_digits_is_refused(number: str) -> None:
    """Hexadecimal numbers of YAML have no limit on their digits."""
    with pytest.raises(UserError, match="more than 100 digits"):
        parse_yaml(f"steps: {number}", "record x.yaml")
    if number.isdecimal():
        with pytest.raises(ValueError, match="more than 100 digits"):
            parse_json(f'{{"steps": {number}}}')


def test_large_numbers_are_read() -> None:
    assert parse_yaml(f"a: {10**30}\nb: 0xff\nc: -{10**99}\nd: 1:30", "x") == {
        "a": 10**30,
        "b": 255,
        "c": -(10**99),
        "d": 90,
    }
    assert parse_json(f"[{10**30}, -3]") == [10**30, -3]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_full_disk_leaves_nothing_that_blocks_the_next_try(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone ``config.json`` would make the next conversion report that the folder exists."""
    source, target, flush, flushed = tmp_path / "a.yaml", tmp_path / "out", os.fsync, []
    make_layouts("a")["a"].write(source)
    if is_there:
        target.mkdir()

    def full(descriptor: int) -> None:
        flushed.append(descriptor)
        if len(flushed) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(descriptor)

    monkeypatch.setattr("spkv_nas.base.files.os.fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*No space left"):
        convert(source, target)
    assert not [file for file in target.glob("*") if file.is_file()]
    monkeypatch.undo()
    convert(source, target)
    assert {"config.json", "full_attention_heads.tsv"} <= {file.name for file in target.iterdir()}


@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"), [(0o077, 0o600, 0o700), (0o002, 0o664, 0o775)]
)
def test_files_follow_the_umask(
    tmp_path: Path, umask: int, file_mode: int, folder_mode: int
) -> None:
    """Results were readable by everybody, whatever the umask, and not writable by a group."""
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "new" / "one", "text")
        with replacing(tmp_path / "results") as folder:
            write_atomic(folder / "one", "text")
            staged = folder.stat().st_mode & 0o777
        with new_folder(tmp_path / "export") as folder:
            (folder / "one").write_text("text")
    finally:
        os.umask(before)
    assert staged == folder_mode
    for name in ("new", "results", "export"):
        assert (tmp_path / name).stat().st_mode & 0o777 == folder_mode
        assert (tmp_path / name / "one").stat().st_mode & 0o777 == file_mode
