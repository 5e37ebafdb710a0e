"""Test messages as log records: their levels, which Python users choose, and how the command line prints them."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from helpers import make_table

from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base.progress import (
    FORWARD,
    GRADIENT,
    LOGGER,
    SILENT,
    START,
    Agenda,
    Reporter,
    Stages,
    count,
    in_sequence,
)
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
        replace(table, name=name, record=ProbeRecord.of({"model": "m", "signal": signal})).write(
            workspace.probe_dir(name)
        )
    with caplog.at_level(logging.INFO, "spkv_nas"):
        chosen_table(ProposeOptions(workspace=tmp_path))
    assert caplog.messages == [
        "using probe 'mine-head-gates' (head-gates), one of 2 of this model; --probe selects another"
    ]


def test_stages_share_one_bar() -> None:
    """Steps of a stage are named in the note at once, without the count of the step before, and count in their unit."""
    shown: list[tuple[int, int, str, str]] = []

    def show(
        done: int, total: int, note: str = "", *, unit: str = "", left: float | None = None
    ) -> None:
        shown.append((done, total, note, unit))

    stages = Stages(Reporter(lambda _: nullcontext(show)), ["a", "b"])
    for title in ("a", "b"):
        with stages.begin(title) as inner, inner.bar("long", "blocks") as bar:
            bar(1, 2, "loss 3")
    assert shown == [(0, 0, "long", ""), (1, 2, "long loss 3", "blocks")] * 2


def test_a_stage_counts_the_work_of_later_ones() -> None:
    """A stage without a count of its own, and one whose steps were not needed, hide no time and add none."""
    clock, shown = Clock(), list[float | None]()

    def show(
        done: int, total: int, note: str = "", *, unit: str = "", left: float | None = None
    ) -> None:
        shown.append(left)

    stages = Stages(Reporter(lambda _: nullcontext(show), Agenda(clock)), ["a", "b", "c"])
    clock.time = 5.0
    with stages.begin("a") as inner:
        inner.expect("probing", 10.0)
        inner.expect("not needed", 1000.0)
        stages.expect("b", "comparing", 20.0)
        stages.expect("c", "", 2.0, START)
        with inner.bar("probing") as bar:
            clock.time += 10.0
            bar(1, 1)
    assert shown == [None, pytest.approx(1000.0 + 20.0 + 10.0)]
    with stages.begin("b") as inner, inner.bar("comparing") as bar:
        clock.time += 20.0
        bar(1, 1)
    assert shown[2:] == [pytest.approx(30.0), pytest.approx(10.0)]


def test_a_stage_says_no_time_before_work_is_expected() -> None:
    """While the text was read, ``auto`` had no time left."""
    clock, shown = Clock(), list[float | None]()

    def show(
        done: int, total: int, note: str = "", *, unit: str = "", left: float | None = None
    ) -> None:
        shown.append(left)

    stages = Stages(Reporter(lambda _: nullcontext(show), Agenda(clock)), ["a"])
    with stages.begin("a") as inner, inner.bar("reading") as bar:
        clock.time += 1.0
        bar(1, 2)
        clock.time += 1.0
        bar(2, 2)
    assert shown == [None] * 3


def test_a_count_names_its_unit() -> None:
    assert count(3, 1000, "blocks") == "3 of 1,000 blocks"
    assert count(1, 3, "") == "33 %"


class Clock:
    """Clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@dataclass(frozen=True)
class Actual:
    """Step of a simulated command: what is expected of it, and what it turns out to be."""

    name: str
    work: float  # expected
    unit: str
    seconds: float  # that it takes
    totals: tuple[int, ...] = (20,)  # that it counts to, as it goes on; empty: it counts nothing


def simulate(steps: list[Actual], start: float) -> list[tuple[float, float]]:
    """Run steps; return the times of all counts with the time left that was shown, where any was."""
    clock = Clock()
    agenda = Agenda(clock)
    shown: list[tuple[float, float]] = []

    def look() -> None:
        if (left := agenda.left()) is not None:
            shown.append((clock.time, left))

    clock.time += start
    for step in steps:
        agenda.expect(step.name, step.work, step.unit)
    for step in steps:
        agenda.begin(step.name)
        end = step.totals[-1] if step.totals else 20
        for number in range(end):
            if step.totals:
                agenda.advance(
                    step.name,
                    number,
                    step.totals[min(len(step.totals) - 1, number * len(step.totals) // end)],
                )
            look()
            clock.time += step.seconds / end
        if step.totals:
            agenda.advance(step.name, end, end)
        look()
        agenda.end(step.name)
    return [(time, left) for time, left in shown if time < clock.time]


def probing(seconds: float) -> Actual:
    return Actual("probing", 100.0, GRADIENT, seconds)


def folder(seconds: float = 10.0) -> Actual:
    return Actual("the folder", 1.0, START, seconds, ())


@pytest.mark.parametrize(
    "steps",
    [
        # As expected: a pass takes a second
        [probing(100.0), Actual("comparing", 200.0, FORWARD, 200.0), folder()],
        # Stages that take twice or half as long as expected
        [probing(100.0), Actual("comparing", 200.0, FORWARD, 400.0), folder()],
        [probing(100.0), Actual("comparing", 200.0, FORWARD, 100.0), folder()],
        [probing(200.0), Actual("comparing", 200.0, FORWARD, 200.0), folder()],
        [probing(50.0), Actual("comparing", 200.0, FORWARD, 200.0), folder()],
        [probing(100.0), Actual("comparing", 200.0, FORWARD, 200.0), folder(20.0)],
        # A bisection that ends early, which shows late; and one that has to go on
        [probing(100.0), Actual("comparing", 200.0, FORWARD, 100.0, (40, 30, 20)), folder()],
        [probing(100.0), Actual("comparing", 200.0, FORWARD, 280.0, (40, 44, 50, 56)), folder()],
        # Alone
        [Actual("comparing", 100.0, FORWARD, 200.0, (40, 44, 48, 50))],
    ],
)
def test_the_time_left_is_within_a_factor_of_two_and_rises_by_no_more_than_a_half(
    steps: list[Actual],
) -> None:
    shown = simulate(steps, start=10.0)
    end = 10.0 + sum(step.seconds for step in steps)
    after_a_tenth = [(time, left) for time, left in shown if time >= end / 10]
    assert len(after_a_tenth) > 10
    for time, left in after_a_tenth:
        assert 0.5 * end <= time + left <= 2.0 * end
    # At a tenth itself, the time left is known as well
    time, left = after_a_tenth[0]
    assert 0.5 * (end - time) <= left <= 2.0 * (end - time)
    lowest = after_a_tenth[0][1]
    for _, left in after_a_tenth:
        assert left <= 1.5 * lowest + 1.0
        lowest = min(lowest, left)


def test_a_second_count_is_no_second_estimate() -> None:
    """The time left of a step that counted to its end is that of the steps behind it."""
    shown = simulate([probing(100.0), Actual("validating", 100.0, FORWARD, 100.0)], start=1.0)
    at_border = min(shown, key=lambda each: abs(each[0] - 101.0))
    assert at_border[1] == pytest.approx(100.0, rel=0.1)


def test_finished_work_of_an_earlier_run_tells_no_speed() -> None:
    clock = Clock()
    agenda = Agenda(clock)
    agenda.begin("training")
    agenda.advance("training", 50, 100)
    assert agenda.left() is None
    clock.time = 10.0
    agenda.advance("training", 60, 100)
    assert agenda.left() == pytest.approx(40.0)


def test_parts_of_a_sequence_make_up_one_count() -> None:
    """Python callbacks get one count of all parts."""
    counts: list[tuple[int, int]] = []
    first, second = in_sequence(lambda done, total: counts.append((done, total)), [30.0, 10.0])
    first(1, 2)
    first(2, 2)
    second(1, 5)
    second(5, 5)
    assert counts == [(15, 40), (30, 40), (32, 40), (40, 40)]
    assert [part(1, 2) for part in in_sequence(None, [1.0])] == [None]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            {},
            ["probe: starting", "scoring 50 % of the text", "reused 2 of 3 runs", "few documents"],
        ),
        ({"quiet": True}, ["few documents"]),
        (
            {"verbose": True},
            [
                "probe: starting",
                "scoring 50 % of the text",
                "reused 2 of 3 runs",
                "few documents",
                "on cpu",
            ],
        ),
    ],
)
def test_the_command_line_prints_messages_once(
    options: dict[str, bool],
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)
    with working("probe", **options):
        report_all()
    assert capsys.readouterr().err.splitlines() == lines
    assert not caplog.records  # no handler of the root logger prints them again
    assert (LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)) == before
