"""Test what later stages read from the layouts of a proposal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
