"""Test the section of a verdict on the page: its numbers are those of the file, its sentences those of the command."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import Page, make_domain_table

from spkv_nas.artifacts.displacement import COLUMNS
from spkv_nas.artifacts.result_tables import VERDICT
from spkv_nas.report import page as report_page
from spkv_nas.report.benchmark_sections import read_benchmarks
from spkv_nas.report.chart import Line, Points, Rule, Section
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.page import write_report
from spkv_nas.report.verdict_cards import verdict_section

ROWS = (
    ("mine", "nll", "passes", 1.0, "%", 0.123, -0.4, 0.9, 64, None, 0.01, 1.0),
    ("mine", "ruler", "open", 2.0, "points", 0.0, math.nan, 3.5, 16, 120, 0.2, 1.0),
    ("<other>", "nll", "fails", 1.0, "%", 40.0, 12.0, math.nan, 24, None, 1.0, 0.001),
)
RECORD: dict[str, Any] = {
    "answers": {"mine": "open", "<other>": "fails"},
    "risk": 0.05,
    "against": "teacher",
    "nouns": {"nll": "documents", "ruler": "questions"},
    "left_out": {"documents": 7, "selected_by": ["probe mine"]},
    "unrecorded": ["<other>"],
}


def rows() -> pd.DataFrame:
    return pd.DataFrame(ROWS, columns=VERDICT.header[: -len(COLUMNS) - 1]).astype(
        {"more_samples": "Int64"}
    )


@pytest.fixture
def section(tmp_path: Path) -> Section:
    VERDICT.write(tmp_path, rows(), RECORD)
    (section,) = read_benchmarks(tmp_path)
    return section


def test_displacement_is_said_with_the_answer() -> None:
    displaced = dict.fromkeys(COLUMNS, 1.0)
    displaced |= {"num_compared": 900, "kl_mean": 0.0123, "kl_quantile": 0.41, "same_top": 96.8}
    table = rows().assign(**displaced)
    table.loc[1:, list(COLUMNS)] = math.nan
    first, second, *_ = verdict_section("verdict", table, RECORD).findings
    assert first.endswith("; KL divergence 0.0123 mean, 0.410 at 99.9 %; same top token 96.8 %.")
    assert "KL" not in second


def test_clipped_documents_are_said_with_the_answer() -> None:
    table = rows().assign(num_clipped=[2, *[0] * (len(ROWS) - 1)])
    first, second, *_ = verdict_section("verdict", table, RECORD).findings
    assert re.search(r"; 2 of \d+ documents lose more than 10 % and count as that\.", first)
    assert "count as that" not in second


def test_a_card_per_criterion(section: Section) -> None:
    nll, ruler = section.charts
    assert (nll.name, ruler.name) == ("verdict-nll", "verdict-ruler")
    assert "margin 1 %" in nll.note
    assert "mine passes, <other> fails" in nll.note
    assert [mark.value for mark in nll.marks if isinstance(mark, Rule)] == [0.0, 1.0]
    intervals = [mark.x for mark in nll.marks if isinstance(mark, Line)]
    assert intervals[0] == (-0.4, 0.9)
    assert intervals[1] == (nll.x.high, nll.x.high)  # beyond the axis, as the loss
    points = {mark.label: mark for mark in nll.marks if isinstance(mark, Points)}
    assert (points["passes"].x, points["passes"].y) == ((0.123,), (0.0,))
    assert (points["fails"].x, points["fails"].names) == ((nll.x.high,), ("+40.0",))
    assert points["fails"].tips == ("<other> fails: +40.0 %, at least +12.0 %, on 24 documents",)
    assert 4.0 <= nll.x.high < 6.0
    (only,) = [mark for mark in ruler.marks if isinstance(mark, Line)]
    assert only.x == (ruler.x.low, 3.5)


def test_one_wide_interval_does_not_hide_the_margin() -> None:
    wide = rows()
    wide.loc[0, ["low", "high"]] = -900.0, 5000.0
    (chart, _) = verdict_section("verdict", wide.drop(2), RECORD).charts
    assert chart.x.high - chart.x.low < 10.0


def test_the_sentences(section: Section) -> None:
    assert section.findings[:2] == (
        "mine is open: ruler after 16 questions; about 120 more would tell.",
        "<other> fails: its loss is above 1 % (nll).",
    )
    assert section.findings[2].startswith(
        "Risk of a wrong pass, and of a wrong failure, 5 % each for all 2 candidates"
    )
    assert "selected by probe mine: 7 documents of this text excluded" in section.findings[2]
    assert section.findings[2].endswith(
        "the documents used to select <other> are not known, so they may be in this text."
    )


def test_a_text_without_more_samples_is_said() -> None:
    sentences = verdict_section("verdict", rows(), RECORD | {"num_samples": {"ruler": 16}}).findings
    assert (
        sentences[0]
        == "mine is open: ruler after 16 questions, all that this text gives; about 120 more would tell."
    )


def test_layouts_are_named_by_their_size() -> None:
    """Name the windows too if there are several; an older record has no memory."""
    several = {"heads": "GLM LLL L=8 M=64", "window": 8, "kv_cache_percent": 26.94}
    layouts = {"mine": several, "<other>": {"heads": "GL LL", "window": 8}}
    section = verdict_section("verdict", rows(), RECORD | {"layouts": layouts, "context": 2048})
    assert section.findings[0].startswith(
        "mine (1 of 6 heads, 26.9 % KV cache, windows L 8, M 64) is open:"
    )
    assert section.findings[1].startswith("<other> (1 of 4 heads) fails:")
    assert [text for _, text in section.charts[0].y.ticks] == [
        "mine (1 of 6 heads) ",
        "<other> (1 of 4 heads) ",
    ]
    assert section.about.endswith("The KV cache is a share of full attention's at 2,048 tokens.")


def test_a_verdict_without_samples() -> None:
    empty = verdict_section("verdict", rows().iloc[:0], RECORD | {"answers": {"mine": "open"}})
    assert "mine is open: its samples are not measured yet." in empty.findings
    assert not empty.charts


def test_the_page_escapes_names(
    section: Section, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    file = write_report(tmp_path, ReportInputs(make_domain_table(), {}, benchmarks=(section,)))
    text = file.read_text(encoding="utf-8")
    assert "<other>" not in text.partition("<script")[0]
    shown = Page(text).texts
    assert any("+0.123" in each for each in shown["td"])
