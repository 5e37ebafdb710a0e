"""Files that are written and read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from spkv_nas.base.files import read_yaml, write_yaml


@pytest.mark.parametrize("text", ["1e5", "1234e5678901", "12.5e-3", "true", "null", "2024-13-45", "0x1f", "ab: c"])
def test_text_stays_text(tmp_path: Path, text: str) -> None:
    """A commit such as 1234e5678901 was written bare, and read back as a number."""
    write_yaml(tmp_path / "a.yaml", {"commit": text})
    assert read_yaml(tmp_path / "a.yaml", "test") == {"commit": text}


def test_a_list_that_stands_twice_can_be_read_again(tmp_path: Path) -> None:
    """The strict reader refuses aliases, so none is written."""
    taus = [0.1, 0.5]
    write_yaml(tmp_path / "a.yaml", {"one": taus, "other": taus})
    assert read_yaml(tmp_path / "a.yaml", "test") == {"one": taus, "other": taus}
