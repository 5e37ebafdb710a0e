"""Test what later stages read from the layouts of a proposal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import make_table

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.proposal import Proposal


def test_later_stages_use_the_sink_tokens_of_the_layouts(tmp_path: Path) -> None:
    """After ``propose --sinks 4`` the page described layouts with the probe's number, and wrote such files."""
    table = make_table([[0.9, 0.2], [0.4, 0.3]])
    layouts = [Layout(("GL", "LL"), 8, "four", sinks=4), Layout(("LL", "GL"), 8, "other", sinks=4)]
    files = [tmp_path / f"{layout.strategy}.yaml" for layout in layouts]
    for layout, file in zip(layouts, files, strict=True):
        layout.write(file)
    assert Proposal.read(files).table(table).sinks == 4
    replace(layouts[1], sinks=1).write(files[1])
    assert Proposal.read(files).table(table) is table


@pytest.mark.parametrize(
    ("heads", "windows", "names"),
    [
        (("GL", "GG"), (8, 8), ["densest-1", "densest-2"]),
        (("GL", "GL"), (8, 4), ["densest-window-8", "densest-window-4"]),
        (("GL", "GL"), (8, 8), ["densest-a", "densest-b"]),
    ],
    ids=["heads", "window", "folder"],
)
def test_layouts_of_one_strategy_are_named_by_what_differs(
    tmp_path: Path, heads: tuple[str, str], windows: tuple[int, int], names: list[str]
) -> None:
    files = [tmp_path / folder / "densest.yaml" for folder in ("a", "b")]
    for file, row, window in zip(files, heads, windows, strict=True):
        Layout((row,), window, "densest").write(file)
    assert list(Proposal.read(files).layouts) == names
