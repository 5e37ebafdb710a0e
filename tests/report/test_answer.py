"""Test the page of a verdict on layouts with several windows: the answer first, from one record, and details folded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import Page, make_domain_table
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from spkv_nas.artifacts.comparison import DENSE
from spkv_nas.artifacts.displacement import COLUMNS
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.measurement import Measurement
from spkv_nas.artifacts.result_tables import VERDICT
from spkv_nas.report import page as report_page
from spkv_nas.report import plot
from spkv_nas.report.answer import answer_layout, loss_memory_chart, position_chart
from spkv_nas.report.chart import Line, Points
from spkv_nas.report.density_charts import grid_chart, window_shades
from spkv_nas.report.evidence import VERDICT as VERDICT_SOURCE
from spkv_nas.report.evidence import Evidence, Result, all_evidence
from spkv_nas.report.inputs import ReportInputs, ResultFile
from spkv_nas.report.page import write_report
from spkv_nas.report.verdict import Verdict, conclude

NAME = "<img src=x onerror=alert(1)>"
CHOSEN = Layout(("GL", "MN", "LL", "LM"), windows={"L": 8, "M": 16, "N": 64}, strategy=NAME)
SMALLER = Layout(
    ("LL", "LN", "LL", "LM"), windows={"L": 8, "M": 16, "N": 64}, strategy="window-per-head-10"
)
NOUNS = {"nll": "documents"}


def result(path: str, margin: float, rows: dict[Layout, tuple[Any, ...]]) -> ResultFile:
    """Make a verdict of layouts: answer, loss, low, high and number of documents of each."""
    lines = [
        (layout.strategy, "nll", answer, margin, "%", loss, low, high, number, None, 0.01, 1.0)
        for layout, (answer, loss, low, high, number) in rows.items()
    ]
    layouts = {
        layout.strategy: {
            "heads": layout.words,
            "window": layout.window,
            "kv_cache_percent": 10.0 + 5 * place,
        }
        for place, layout in enumerate(rows)
    }
    record = {
        "answers": {layout.strategy: answer for layout, (answer, *_) in rows.items()},
        "layouts": layouts,
        "nouns": NOUNS,
        "risk": 0.05,
        "context": 512,
        "against": "<b>dense</b>",
        "by_position": {
            NAME: [[0, 16, 320, 2.02, 2.0], [16, 32, 300, 2.1, 2.0], [32, 64, 280, 2.06, 2.0]]
        },
    }
    return ResultFile(
        Path(path), pd.DataFrame(lines, columns=VERDICT.header[: -len(COLUMNS) - 1]), record
    )


@pytest.fixture
def inputs() -> ReportInputs:
    now = {SMALLER: ("fails", 2.88, 1.2, np.nan, 41), CHOSEN: ("passes", 0.709, np.nan, 0.96, 197)}
    earlier = {SMALLER: ("passes", 1.65, np.nan, 2.63, 64)}
    files = (
        result("reports/p/verdict.csv", 1.0, now),
        result("reports/p/verdict-0a1b2c3d.csv", 3.0, earlier),
    )
    return ReportInputs(replace(make_domain_table(), window=4), {}, verdicts=files)


def test_the_headline_is_one_record(inputs: ReportInputs) -> None:
    verdict = conclude(inputs)
    assert "".join(verdict.lead) == (
        f"{NAME}: 15.0 % of the KV cache at 512 tokens; nll +0.709 %, at most +0.960 %, on 197 documents; "
        "passes 1 % (nll) at a risk of 5 %."
    )
    assert verdict.sentences == (
        "1 of 8 KV heads are global. Local heads see their last keys, by letter: L 8, M 16, N 64. "
        "The loss is against <b>dense</b>, without retraining.",
    )
    layout = answer_layout(inputs, verdict)
    assert layout is not None
    assert layout.content_hash == CHOSEN.content_hash


def test_every_measurement_is_a_point_with_its_own_numbers(inputs: ReportInputs) -> None:
    verdict = conclude(inputs)
    chart = loss_memory_chart(all_evidence(inputs), verdict)
    assert chart is not None
    points = [mark for mark in chart.marks if isinstance(mark, Points)]
    found = {
        (mark.label, x, y, name)
        for mark in points
        for x, y, name in zip(mark.x, mark.y, mark.names, strict=False)
    }
    assert found == {
        ("fails", 10.0, 2.88, "window-per-head-10"),
        ("passes", 15.0, 0.709, "<img src=x onerror=aler…"),
        # It passes 3 %, which is not the margin of this answer
        ("at another margin", 10.0, 1.65, "window-per-head-10"),
    }
    (ring,) = (mark for mark in points if mark.hollow)
    assert (ring.x, ring.y) == ((15.0,), (0.709,))
    tips = {tip for mark in points for tip in mark.tips}
    assert (
        "window-per-head-10\n10.0 % of the KV cache at 512 tokens\n+1.65 %, at most +2.63 %, on 64 documents\n"
        "passes 3 % (nll) at a risk of 5 %" in tips
    )
    # An end that is not known has no line
    lines = {mark.y for mark in chart.marks if isinstance(mark, Line)}
    assert lines == {(1.2, 2.88), (0.709, 0.96), (1.65, 2.63)}


CROWDS = {
    "beside-an-interval": [
        ("window-per-head-18", "passes", 0.83, 0.65, 0.98, 17.2),
        ("window-per-head-15", "open", 1.17, 0.93, 1.4, 15.0),
        ("window-per-head-12", "fails", 1.98, 1.24, 2.65, 11.9),
    ],
    "of-one-memory": [
        ("window-per-head-15", "passes", 0.62, np.nan, 0.95, 15.0),
        ("window-per-head-18", "passes", 0.5, np.nan, 0.9, 17.9),
        ("one-window-512", "open", 0.9, 0.6, 1.25, 15.0),
        ("one-window-256", "fails", 1.4, 1.1, 1.9, 14.9),
    ],
    "of-one-loss": [
        ("window-per-head-15", "passes", 0.3, np.nan, 0.6, 15.0),
        ("one-window-256", "passes", 0.35, np.nan, 0.65, 14.9),
        ("head-gates-256", "passes", 0.33, 0.1, 0.6, 14.8),
    ],
    "at-the-edge": [
        ("window-per-head-15", "passes", -0.02, np.nan, 0.3, 15.0),
        ("window-per-head-12", "passes", 0.02, np.nan, 0.4, 12.0),
        ("window-per-head-10", "passes", 0.1, np.nan, 0.5, 10.0),
        ("window-per-head-8", "fails", 1.3, 1.01, 1.6, 8.0),
    ],
}


@pytest.mark.parametrize("rows", CROWDS.values(), ids=CROWDS.keys())
def test_names_cover_neither_points_nor_the_frame(rows: list[tuple[Any, ...]]) -> None:
    """The name of the chosen layout touched its ring, or was left out, and the margin's name covered points."""
    results = []
    for name, answer, loss, low, high, percent in rows:
        measured = Measurement(
            candidate=name,
            criterion="nll",
            answer=answer,
            margin=1.0,
            unit="%",
            loss=loss,
            low=low,
            high=high,
            num_samples=100,
            noun="documents",
            more_samples=None,
            num_available=1000,
            risk=0.05,
            against="dense",
            kv_cache_percent=percent,
            context=512,
        )
        results.append(Result(name, loss, share=percent / 100, measured=(measured,)))
    evidence = Evidence("by a verdict", 0.0, VERDICT_SOURCE, DENSE, tuple(results))
    chart = loss_memory_chart(
        [evidence], Verdict(("", "", ""), layout=results[0], evidence=evidence)
    )
    assert chart is not None
    with plot.drawing():
        (axes,) = plot.draw(chart).axes
        names = {}
        for text in axes.texts:
            text.get_window_extent()  # places it
            names[text.get_text()] = Text.get_window_extent(text)  # without the line to the point
    assert {results[0].name, "margin 1 %"} <= names.keys()
    points = [mark for mark in chart.marks if isinstance(mark, Points)]
    for text, box in names.items():
        assert axes.bbox.padded(1.0).containsx(box.x0), text
        assert axes.bbox.padded(1.0).containsx(box.x1), text
        assert axes.bbox.padded(1.0).containsy(box.y0), text
        for mark in points:
            for x, y in axes.transData.transform(list(zip(mark.x, mark.y, strict=True))):
                size = mark.size
                disc = Bbox.from_bounds(x - size, y - size, 2 * size, 2 * size)
                assert not box.overlaps(disc), text
    boxes = list(names.values())
    assert not any(box.count_overlaps(boxes[:index]) for index, box in enumerate(boxes))


def test_loss_by_position_is_of_the_chosen_layout(inputs: ReportInputs) -> None:
    chart = position_chart(conclude(inputs))
    assert chart is not None
    points = next(mark for mark in chart.marks if isinstance(mark, Points))
    assert points.y == pytest.approx((1.0, 5.0, 3.0))
    assert [text for _, text in chart.x.ticks] == ["0", "16", "32"]


def test_the_darker_a_head_the_more_it_sees() -> None:
    assert window_shades(CHOSEN) == {
        "G": 0.0,
        "L": 1.0,
        "M": pytest.approx(2 / 3),
        "N": pytest.approx(1 / 3),
    }
    cells = grid_chart(CHOSEN, small=False).heatmap
    assert cells is not None
    assert cells.letters == ("GMLL", "LNLM")


def test_the_page_begins_with_the_answer_and_escapes_names(
    inputs: ReportInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    text = write_report(tmp_path, inputs).read_text(encoding="utf-8")
    shown, _, data = text.partition('<script type="application/json" id="data">')
    # Nothing that a name brings is markup
    assert "<img" not in text
    assert "<b>" not in text
    assert "<" not in data.partition("</script>")[0]
    # The answer is not folded, and all that was there before is
    page = Page(text)
    assert next(iter(page.all("h2")))["id"] == "answer"
    for part in ('id="density"', 'id="explorer-budget"', 'id="words"', 'id="provenance"'):
        before = shown.partition(part)[0]
        assert before.count("<details") > before.count("</details>"), part
    answer = shown.partition('id="answer"')[2].partition("<details")[0]
    for name in ("windows", "loss-memory", "loss-position"):
        assert f'data-chart="{name}"' in answer
    assert "L: the last 8 keys (4 heads)" in answer
    # The glossary is of the chosen layout's windows, not of the probe's
    assert "here 8 or 16 or 64" in shown
    assert "here L 8, M 16, N 64" in shown
