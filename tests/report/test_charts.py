"""Test charts: what is drawn, that labels hide nothing, and that pictures have the same bytes every time."""

from __future__ import annotations

import math
import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers import make_comparison, make_domain_table, make_positions
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from spkv_nas.artifacts.comparison import COLUMNS, read_comparison, write_comparison
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.proposal.answers import coverage_by_budget
from spkv_nas.report.chart import (
    Axis,
    Chart,
    Heatmap,
    Line,
    Panels,
    Points,
    Rule,
    decades_axis,
    log_axis,
    round_axis,
    spread_axis,
)
from spkv_nas.report.density_charts import (
    density_chart,
    domain_chart,
    position_chart,
    position_profile,
)
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.page_svg import draw_chart
from spkv_nas.report.plot import cividis, draw, save_chart
from spkv_nas.report.result_charts import coverage_budget_chart, coverage_nll_chart

pytestmark = pytest.mark.usefixtures("whole_pictures")


def test_colours_are_cividis_from_zero_to_one() -> None:
    assert cividis(1.0) == cividis(1.5) == ("#fee838", "#000")
    assert cividis(0.0) == cividis(-0.5) == ("#00224e", "#fff")
    cells = density_chart(make_domain_table()).marks[0]
    assert isinstance(cells, Heatmap)
    assert cells.values[1][1] == 0.6


def test_error_bars_reach_one_standard_error() -> None:
    comparison = ReportInputs(make_domain_table(), {}, comparison=make_comparison()).comparison
    assert comparison is not None
    chart = coverage_nll_chart(comparison)
    assert chart is not None
    layouts, gates, full = [mark for mark in chart.marks if isinstance(mark, Points)]
    assert layouts.names == ("densest", "last", "spread")
    assert (layouts.x[0], layouts.y[0], layouts.error[0]) == (47.1, 0.2, 0.01)
    assert gates.shape != full.shape != layouts.shape
    assert math.isnan(full.error[0])
    (ax,) = draw(chart).axes
    (drawn,) = [
        path
        for path in ax.collections
        if np.allclose(path.get_paths()[0].vertices, [[47.1, 0.19], [47.1, 0.21]])
    ]
    assert drawn is not None


def names_of(chart: Chart) -> list[tuple[str, Bbox]]:
    """Return the names that a chart's figure has beside its marks, with their boxes in points."""
    figure = draw(chart)
    figure.draw_without_rendering()
    texts = [text for text in figure.axes[0].texts if text.get_text()]
    return [(text.get_text(), Text.get_window_extent(text)) for text in texts]


def test_names_cover_no_mark_and_no_other_name() -> None:
    axis = Axis("x", 0.0, 400.0, ())
    points = Points(
        tuple(100.0 + 3 * i for i in range(7)),
        tuple(100.0 + 2 * (i % 3) for i in range(7)),
        names=("strategy",) * 7,
    )
    chart = Chart("a", "", axis, axis, (points,))
    boxes = [box for _, box in names_of(chart)]
    assert len(boxes) == 7
    assert not any(first.overlaps(second) for first, second in combinations(boxes, 2))
    marks = draw(chart).axes[0].transData.transform(np.column_stack([points.x, points.y]))
    assert not any(box.contains(*mark) for box in boxes for mark in marks)


def test_the_name_of_a_vertical_line_keeps_off_curves() -> None:
    axis = Axis("x", 0.0, 10.0, ())
    curves = Line((0.0, 10.0), (9.9, 9.9)), Line((5.0, 9.0), (0.0, 9.0))
    chart = Chart("a", "", axis, axis, (Rule(5.0, "knee"), *curves))
    ((name, box),) = names_of(chart)
    ax = draw(chart).axes[0]
    (x, bottom), top = ax.transData.transform((5.0, 9.0)), ax.transData.transform((5.0, 9.9))[1]
    assert name == "knee"
    assert bottom < box.y0 < box.y1 < top or box.x1 < x  # between the curves, or left of the line


def test_the_page_has_the_elements_of_the_picture() -> None:
    """Colours are the page's variables, marks with tooltips refer to its data, and nothing has a style."""
    comparison = ReportInputs(make_domain_table(), {}, comparison=make_comparison()).comparison
    assert comparison is not None
    chart = coverage_nll_chart(comparison)
    assert chart is not None
    root = ElementTree.fromstring(draw_chart(chart))
    marks = [element.get("data-mark") for element in root.iter() if element.get("data-mark")]
    assert marks == ["0,0", "0,1", "0,2", "1,0", "2,0"]
    texts = [element.text for element in root.iter("text")]
    assert {"densest", "last", "spread", "layout", "control", chart.x.title, chart.y.title} <= set(
        texts
    )
    colours = {element.get(kind) for element in root.iter() for kind in ("fill", "stroke")} - {
        None,
        "none",
    }
    assert colours == {f"var(--{name})" for name in ("accent", "ink", "muted", "line", "card")}
    assert not any(
        {"style", "id"} & set(element.keys())
        for element in root.iter()
        if element.tag not in ("title", "desc")
    )


def test_ticks_are_round() -> None:
    def shown(axis: Axis) -> list[str]:
        assert all(axis.low - 1e-9 <= value <= axis.high + 1e-9 for value, _ in axis.ticks)
        return [text for _, text in axis.ticks]

    assert shown(round_axis("", 0, 1)) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert shown(round_axis("", 0, 63, exact=True)) == ["0", "20", "40", "60"]
    assert shown(round_axis("", -0.13, 0.3)) == ["\N{MINUS SIGN}0.1", "0", "0.1", "0.2", "0.3"]
    assert round_axis("", 0, 4.05).high == pytest.approx(4.35)
    assert round_axis("", 0, 4, padded=True).low == pytest.approx(-0.3)
    assert shown(round_axis("", 2, 2)) == ["2", "2.2", "2.4", "2.6", "2.8", "3"]
    assert shown(decades_axis("", 3e18, 2e21, powers=True)) == ["10¹⁹", "10²⁰", "10²¹"]
    assert shown(decades_axis("", 0.04, 3, multiples=(1, 2, 5))) == [
        "0.05",
        "0.1",
        "0.2",
        "0.5",
        "1",
        "2",
    ]
    assert shown(log_axis("", 1.9, 3.3)) == ["2", "2.25", "2.5", "2.75", "3", "3.25"]
    assert shown(spread_axis("", 0.6, 28)) == ["1", "2", "5", "10", "20"]
    assert shown(spread_axis("", 0.6, 5.9)) == ["0", "2", "4", "6"]
    assert not spread_axis("", -0.1, 28).log


@pytest.mark.parametrize(
    "chart",
    [
        coverage_budget_chart(
            make_domain_table(), {"one": Layout(("GL", "LG", "LL", "LL"), 8)}, {"one": 0.5}, None
        ),
    ],
    ids=lambda chart: chart.name,
)
def test_pictures_have_the_same_bytes_every_time(chart: Chart | Panels, tmp_path: Path) -> None:
    for run in ("one", "two"):
        save_chart(tmp_path / run, chart)
    for kind in ("png", "svg", "pdf"):
        one, two = (
            (tmp_path / run / f"{chart.name}.{kind}").read_bytes() for run in ("one", "two")
        )
        assert one == two


def test_a_comparison_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = make_comparison().reindex(columns=list(COLUMNS))
    write_comparison(tmp_path / "comparison.csv", rows)
    read = read_comparison(tmp_path / "comparison.csv")
    assert list(read.columns) == list(COLUMNS)
    assert read["nll"].tolist() == rows["nll"].tolist()
    assert read["delta_nll_percent"][0] == 0.0
    assert read["zero_shot_nll"].isna().all()
    assert read["note"].tolist() == [""] * 5
    write_comparison(tmp_path / "comparison.csv", rows.head(0))
    assert read_comparison(tmp_path / "comparison.csv").empty


def test_a_layout_named_like_a_missing_value(tmp_path: Path) -> None:
    """A layout named NA or null keeps its name."""
    write_comparison(
        tmp_path / "comparison.csv",
        make_comparison(strategy=["full-attention", "NA", "null", "nan", "a"]),
    )
    assert read_comparison(tmp_path / "comparison.csv")["strategy"].tolist() == [
        "full-attention",
        "NA",
        "null",
        "nan",
        "a",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nll\n2.0\n", "column 'strategy' is missing"),
        ("strategy,nll\na,2.0\n,2.0\n", "line 3: the strategy has no name"),
        (
            "strategy,nll\na,2.0\nb,much\n",
            "line 3: column 'nll' must be a number in [0, 1e+09]; found 'much'",
        ),
    ],
    ids=["column", "name", "number"],
)
def test_an_unreadable_comparison_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "comparison.csv").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        read_comparison(tmp_path / "comparison.csv")


def test_budget_curve_ends_at_everything() -> None:
    curve = coverage_by_budget(make_domain_table())
    assert curve is not None
    assert curve.iloc[-1, 1:].tolist() == pytest.approx([1.0] * 4)
    assert curve["interleaved-last"].notna().tolist() == [False, True] * 4
    assert curve.loc[1, "interleaved-last"] == pytest.approx(1.2 / 3.4)  # one layer: the last
    assert (curve["densest"] >= curve["random"] - 1e-12).all()


def test_profiles() -> None:
    table = make_domain_table(("code", "docs"), positions=make_positions())
    assert (
        f"code {table.measure.exact(table.mean)}, docs {table.measure.exact(table.mean)}"
        in domain_chart(table).words
    )
    positions = position_profile(table)
    assert positions is not None
    assert positions["mean"].tolist() == pytest.approx([0.05, 0.13])
    assert (positions["low"] <= positions["mean"]).all()
    assert position_profile(make_domain_table()) is None


@pytest.mark.parametrize("last", [16, 90])
def test_positions_of_unequal_parts_are_logarithmic(last: int) -> None:
    positions = make_positions().replace({"end": {16: last}})
    chart = position_chart(make_domain_table(("code", "docs"), positions=positions))
    assert chart is not None
    assert (chart.x.log, chart.x.high) == (last == 90, last)
    line = next(mark for mark in chart.marks if isinstance(mark, Line))
    assert all(chart.x.low <= x <= chart.x.high for x in line.x)
    assert (
        'fill="var(--accent)" fill-opacity="0.18"' in draw_chart(chart).partition('class="tick"')[2]
    )


def test_an_error_bar_below_zero_ends_at_a_logarithmic_axis() -> None:
    chart = Chart(
        "a",
        "",
        round_axis("", 0, 2),
        log_axis("ΔNLL %", 0.02, 20.0),
        (Points((1.0,), (0.1,), (0.5,)),),
    )
    root = ElementTree.fromstring(draw_chart(chart))
    height = float(root.attrib["viewBox"].split()[3])
    paths = [re.findall(r"-?[\d.]+ (-?[\d.]+)", path.attrib["d"]) for path in root.iter("path")]
    assert all(0 <= float(y) <= height for path in paths for y in path)
    assert len(paths) >= 3
