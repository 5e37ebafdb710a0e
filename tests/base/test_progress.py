"""Test messages as log records: their levels, which Python users choose, and how the command line prints them."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import make_table

from spkv_nas.base.progress import LOGGER, SILENT, Reporter, Stages
from spkv_nas.base.workspace import Workspace
from spkv_nas.cli.screen import working
from spkv_nas.stages.lookup import chosen_table
from spkv_nas.stages.options.propose import ProposeOptions


def report_all() -> None:
    """Report one message of each kind; one has a percent sign, which formats nothing."""
    SILENT.announce("scoring 50 % of the text")
    SILENT.reused(2, 3, "runs")
    SILENT.caution("few documents")
    SILENT.detail("on cpu")


def test_levels(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "spkv_nas"):
        assert SILENT.verbose
        report_all()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "scoring 50 % of the text"),
        ("INFO", "reused 2 of 3 runs"),
        ("WARNING", "few documents"),
        ("DEBUG", "on cpu"),
    ]


def test_a_level_can_be_chosen(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "spkv_nas"):
        report_all()
    assert caplog.messages == ["few documents"]


def test_library_functions_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Functions called without a reporter log their messages."""
    workspace, table = Workspace(tmp_path), make_table([[0.5, 0.4]])
    for name, signal in (("mine", "density"), ("mine-head-gates", "head-gates")):
        replace(table, name=name, metadata={"model": "m", "signal": signal}).write(workspace.probe_dir(name))
    with caplog.at_level(logging.INFO, "spkv_nas"):
        chosen_table(ProposeOptions(workspace=tmp_path))
    assert caplog.messages == [
        "using probe 'mine-head-gates' (head-gates), one of 2 of this model; --probe selects another"
    ]


def test_stages_share_one_bar() -> None:
    """It moves forward only, with the step that takes the time."""
    shown: list[tuple[int, int, str]] = []
    stages = Stages(Reporter(lambda _: nullcontext(lambda *call: shown.append((*call, "")[:3]))), {"a": 3.0, "b": 1.0})
    for title in ("a", "b"):
        with stages.begin(title, "long") as inner:
            for step in ("short", "long", "short"):
                with inner.bar(step) as bar:
                    bar(1, 1)
    assert [done for done, _, _ in shown] == [0, 0, 750, 750, 750, 750, 1000, 1000]
    assert {total for _, total, _ in shown} == {1000}
    assert shown[2][2] == "long"


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({}, ["probe: starting", "scoring 50 % of the text", "reused 2 of 3 runs", "few documents"]),
        ({"quiet": True}, ["few documents"]),
        (
            {"verbose": True},
            ["probe: starting", "scoring 50 % of the text", "reused 2 of 3 runs", "few documents", "on cpu"],
        ),
    ],
)
def test_the_command_line_prints_messages_once(
    options: dict[str, bool], lines: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)
    with working("probe", **options):
        report_all()
    assert capsys.readouterr().err.splitlines() == lines
    assert not caplog.records  # no handler of the root logger prints them again
    assert (LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)) == before
