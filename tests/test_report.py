"""The report: what it says, that nothing in it can act, and that its figures are the same every time."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from helpers import Page, make_domain_table, make_layouts
from matplotlib.text import Text

from spkv_nas.artifacts.comparison import COLUMNS, read_comparison, write_comparison
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import read_search
from spkv_nas.base.errors import UserError
from spkv_nas.report.axes import decades_axis, log_axis, round_axis
from spkv_nas.report.budget_charts import agreement_charts, budgets_chart
from spkv_nas.report.chart import Axis, Chart, Heatmap, Line, Panels, Points, Rule
from spkv_nas.report.colours import cividis
from spkv_nas.report.data import page_data
from spkv_nas.report.density_charts import density_chart
from spkv_nas.report.figures import write_study_figures
from spkv_nas.report.findings import findings, search_findings
from spkv_nas.report.inputs import Inputs
from spkv_nas.report.labels import Box, Label, chart_labels, place_labels, spread
from spkv_nas.report.page import write_report
from spkv_nas.report.plot import draw, save_chart
from spkv_nas.report.profiles import budget_curve, domain_profile, position_profile
from spkv_nas.report.result_charts import coverage_nll_chart
from spkv_nas.report.search_charts import front_chart, progress_chart, search_charts
from spkv_nas.report.svg import Frame
from spkv_nas.report.tables import safe_csv, search_rows
from spkv_nas.report.training_charts import palindrome_charts

HOSTILE = "<script>alert(1)</script>"
QUOTED = "\"'><img src=x onerror=alert(1)>"


def make_positions() -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"layer": layer, "kv_head": head, "start": start, "end": start + 8, "density": 0.1 * head + start / 100}
            for layer in range(4)
            for head in range(2)
            for start in (0, 8)
        ]
    )


def make_comparison(**columns: list[Any]) -> pd.DataFrame:
    frame = pd.DataFrame(
        {
            "strategy": ["full-attention", "sp-kv", "densest", "last", "spread"],
            "density_percent": [100.0, 42.5, 25.0, 25.0, 25.0],
            "coverage_percent": [100.0, 100.0, 47.1, 35.3, 2.9],
            "nll": [2.0, 2.001, 2.004, 2.006, 2.01],
            "delta_nll_percent": [np.nan, 0.05, 0.2, 0.3, 0.5],
            "delta_nll_standard_error": [np.nan, 0.01, 0.01, 0.01, 0.01],
            "num_global": [np.nan, np.nan, 2, 2, 2],
            "num_seeds": 1,
            "steps": 100,
            "note": [np.nan, "", "", "", ""],
        }
    )
    return frame.assign(**columns)


def say(comparison: pd.DataFrame | None, layouts: dict[str, Layout] | None = None, **record: Any) -> str:
    return " ".join(findings(Inputs.check(make_domain_table(), layouts or {}, comparison=comparison, record=record)))


def make_search(**columns: list[Any]) -> pd.DataFrame:
    """A search of two samplers: two layouts retrained, one of them a baseline."""
    nan = np.nan
    frame = pd.DataFrame(
        {
            "name": ["densest", "density-0-0", "density-0-1", "random-0-0", "random-0-1"],
            "sampler": ["baseline", "density", "density", "random", "random"],
            "seed": 0,
            "trial": [0.0, 0.0, 1.0, 0.0, 1.0],
            "hash": ["a", "a", "b", "c", "d"],
            "num_global": 3.0,
            "coverage_percent": [60.0, 60.0, 50.0, 20.0, 30.0],
            "cost": nan,
            "zero_shot_delta_percent": [0.9, 0.9, 0.5, 2.0, 1.5],
            "zero_shot_standard_error": 0.1,
            "short_delta_percent": [0.8, 0.8, 0.6, nan, 1.4],
            "short_standard_error": [0.1, 0.1, 0.1, nan, 0.1],
            "full_delta_percent": [0.7, 0.7, 0.4, nan, 1.1],
            "full_standard_error": [0.1, 0.1, 0.1, nan, 0.1],
            "heads": "GL LG GL LL",
        }
    )
    return frame.assign(**columns)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report in which every name that a user chooses is hostile."""
    folder = tmp_path_factory.mktemp("report")
    names = (HOSTILE, QUOTED, "=cmd()$a_b$\x07 漢字")
    table = make_domain_table((HOSTILE, QUOTED), positions=make_positions(), metadata={HOSTILE: {QUOTED: [HOSTILE, 1]}})
    write_report(
        folder,
        table=replace(table, name=HOSTILE),
        layouts=make_layouts(*names),
        comparison=make_comparison(strategy=["full-attention", "sp-kv", *names], note=["", "", HOSTILE, QUOTED, "+1"]),
        record={"rank_correlation": {"rho": -1.0, "layouts": 3}, QUOTED: HOSTILE},
        search=make_search(name=[HOSTILE, QUOTED, "b", "c", "d"]),
    )
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "index.html").read_text(encoding="utf-8"))


def test_page_holds_one_script_and_style_each_allowed_by_its_hash(page: Page) -> None:
    policy = next(meta["content"] for meta in page.all("meta") if "http-equiv" in meta) or ""
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert [script.get("type") for script in page.all("script")] == ["application/json", None]
    for tag in ("script", "style"):
        content = page.texts[tag][-1]  # the first script is data, which no policy need allow
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        assert "innerHTML" not in content


def test_page_loads_nothing_and_has_no_inline_handlers(page: Page) -> None:
    assert not page.all("img", "link", "iframe", "object", "use", "foreignobject")
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "style")]
    for link in page.all("a"):
        assert re.match(r"data:text/csv|[a-z-]+\.(png|svg)$", link["href"] or "")


def test_names_appear_as_text(page: Page) -> None:
    assert any(HOSTILE in text for text in page.texts["th"])
    assert any(QUOTED in text for text in page.texts["h3"])
    assert any(HOSTILE in text for text in page.texts["dd"])
    assert any("<script>" in (group.get("aria-label") or "") for group in page.all("g"))
    assert any(HOSTILE in tip for mark in data(page)["domains"]["marks"] for tip in mark["tips"])


def data(page: Page) -> dict[str, Any]:
    charts: dict[str, Any] = json.loads(page.texts["script"][0])["charts"]
    return charts


def test_the_data_of_a_page_cannot_end_it(page: Page) -> None:
    """A domain may be called as the tag that ends the element it stands in."""
    assert "<" not in page.texts["script"][0]
    axis = Axis("", 0.0, 1.0, ())
    text = page_data(
        [Chart("a", "</script><script>", "", axis, axis, (Points((np.pi,), (math.nan,), tips=("<!--",)),))]
    )
    assert "<" not in text
    assert json.loads(text)["charts"]["a"] == {
        "title": "</script><script>",
        **{name: {"title": "", "low": 0, "high": 1, "ticks": []} for name in ("x", "y")},
        "marks": [{"kind": "points", "x": [3.1416], "y": [None], "tips": ["<!--"]}],
    }


def test_every_chart_of_the_page_stands_in_its_data(page: Page) -> None:
    drawn = [svg["data-chart"] for svg in page.all("svg") if "data-chart" in svg]
    assert sorted(str(name) for name in drawn) == sorted(data(page))
    chart: Any = None
    places = dict.fromkeys(drawn, 0)
    for tag, attributes in page.elements:
        if tag == "svg":
            chart = attributes.get("data-chart")
        if "data-at" in attributes:
            number, index = map(int, (attributes["data-at"] or "").split(","))
            mark = data(page)[chart]["marks"][number]
            assert attributes.get("aria-label") or mark["tips"][index]
            places[chart] += 1
    assert places["density"] == places["layout-1"] == 8
    assert places["histogram"] == 20
    assert places["domains"] == 2 * (8 + 1)
    assert data(page)["density"]["marks"][0]["values"] == [[1, 0.2, 0.1, 0.7], [0, 0.6, 0.3, 0.5]]


def test_page_is_accessible(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = [
        name
        for _, attributes in page.elements
        for key in ("aria-labelledby", "aria-describedby")
        for name in (attributes.get(key) or "").split()
    ]
    assert set(references) <= set(ids)
    for svg in page.all("svg"):
        assert svg.get("aria-hidden") == "true" or (svg.get("role") and svg.get("aria-labelledby"))
    assert all("scope" in cell for cell in page.all("th"))
    assert all("aria-labelledby" in table for table in page.all("table"))
    assert len(page.texts["h1"]) == 1
    assert page.all("html")[0]["lang"] == "en"


def test_a_search_is_shown_best_first(page: Page) -> None:
    search = make_search()
    assert [cells[0] for cells in search_rows(search)] == ["density-0-1", "densest", "random-0-1", "random-0-0"]
    assert search_rows(search)[0][1:] == ("3", "50.0", "+0.500 ± 0.100", "+0.600 ± 0.100", "+0.400 ± 0.100")
    progress, retrained = search_charts(search, None)
    assert isinstance(progress, Chart)
    assert [mark.label for mark in progress.marks if isinstance(mark, Line)] == ["density", "random"]
    assert "density 0.500, random 1.500" in progress.description
    assert isinstance(retrained, Panels)
    shown = [mark for mark in retrained.charts[0].marks if isinstance(mark, Points)]
    assert [(mark.label, len(mark.x)) for mark in shown] == [("baseline", 1), ("density", 1), ("random", 1)]
    assert len(search_charts(make_search(cost=[4.0, 4.0, 5.0, 3.0, 6.0]), "cost")) == 3
    assert (
        "density: retrained in full, the best of the short retraining, density-0-1: +0.400 ± 0.100 %."
        in search_findings(search)
    )
    assert "Search" in page.texts["h2"]


def test_figures_of_a_search_follow_its_data(tmp_path: Path) -> None:
    write_study_figures(tmp_path, make_search(cost=[4.0, 4.0, 5.0, 3.0, 6.0]), "seconds")
    names = {"search-progress", "search-retrained", "search-front"}
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    write_study_figures(tmp_path, make_search(full_delta_percent=[math.nan] * 5), None)
    assert {path.name for path in tmp_path.iterdir()} == {"search-progress.png", "search-progress.svg"}


def test_the_front_is_a_staircase() -> None:
    chart = front_chart(make_search(cost=[4.0, 4.0, 5.0, 3.0, 6.0]), "cost")
    density, random = [mark for mark in chart.marks if isinstance(mark, Line)]
    assert (density.x, density.y) == ((4.0, 5.0, 5.0, 6.0), (0.9, 0.9, 0.5, 0.5))
    assert (random.x, random.y) == ((3.0, 6.0, 6.0, 6.0), (2.0, 2.0, 1.5, 1.5))


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (make_search().drop(columns="hash"), "column 'hash' is missing"),
        (make_search(cost=["x"] * 5), "line 2: column 'cost' must be a number; found 'x'"),
    ],
    ids=["column", "number"],
)
def test_an_unreadable_search_is_named(tmp_path: Path, search: pd.DataFrame, message: str) -> None:
    search.to_csv(tmp_path / "search.csv", index=False)
    with pytest.raises(UserError, match=message):
        read_search(tmp_path / "search.csv")


def test_global_heads_are_marked_by_shape(page: Page) -> None:
    outlines = [rect for rect in page.all("rect") if rect.get("class") == "chosen"]
    assert len(outlines) == sum(layout.num_global for layout in make_layouts("a", "b", "c").values())


def test_downloads_hold_no_formula(page: Page) -> None:
    links = {
        link["download"]: unquote(link["href"] or "").split(",", 1)[1] for link in page.all("a") if "download" in link
    }
    assert sorted(links) == ["comparison.csv", "density.csv"]
    assert "'=cmd()" in links["comparison.csv"]
    assert "'+1" in links["comparison.csv"]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", " =1", "\t=1"], ids=repr)
def test_csv_cells_that_act_are_quoted(text: str) -> None:
    frame = pd.DataFrame({text: [text, "plain"], "delta": [-0.5, 1.0]})
    read = pd.read_csv(pd.io.common.StringIO(safe_csv(frame)), skipinitialspace=False)
    assert read.columns[0] == f"'{text}"
    assert read.iloc[:, 0].tolist() == [f"'{text}", "plain"]
    assert read["delta"].tolist() == [-0.5, 1.0]


def test_figures_are_well_formed_and_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    names = {"density", "layouts", "coverage-nll", "coverage-budget", "domains", "positions", "histogram"}
    files = {f"{name}.{suffix}" for name in names for suffix in ("png", "svg")}
    assert {path.name for path in folder.iterdir()} == {"index.html"} | files
    for path in folder.glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        assert not [element for element in root.iter() if element.tag.endswith(("script", "date"))]
        links = [value for element in root.iter() for key, value in element.attrib.items() if key.endswith("href")]
        assert all(link.startswith(("#", "data:image/png")) for link in links)
    table = make_domain_table()
    for run in ("one", "two"):
        write_report(tmp_path / run, table=table, layouts=make_layouts("densest"), comparison=make_comparison())
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_report_without_training_or_layouts(tmp_path: Path) -> None:
    closed = make_domain_table(density=np.zeros((4, 2)))
    text = write_report(tmp_path, table=closed, layouts={}).read_text(encoding="utf-8")
    Page(text)
    assert "the 8 KV heads keep 0.0\u00a0% of the tokens" in text
    assert "Caution." in text
    assert not (tmp_path / "coverage-nll.svg").exists()


def test_result_comes_first() -> None:
    text = say(make_comparison(), rank_correlation={"rho": -1.0, "p_value": 0.0, "layouts": 3})
    assert text.startswith(
        "densest has the lowest NLL of 3 layouts with 2 of 8 KV heads global: 2.0040 nats per token, "
        "0.200 ± 0.010 % above full attention."
    )
    assert "The next, last, is 0.100 percentage points behind, more than two combined standard errors" in text
    assert "It also has the highest density coverage, 47.1 %; coverage puts 3 of 3 pairs" in text
    assert "over 3 layouts is \N{MINUS SIGN}1.00" in text
    assert "keeps 42.5 % of the tokens and is 0.050 ± 0.010 % above full attention" in text


def test_rank_correlations_come_with_their_intervals() -> None:
    coverage = {"rho": -0.9, "layouts": 5, "interval": [-1.0, -0.11]}
    text = say(make_comparison(), rank_correlation=coverage, zero_shot_rank_correlation={"rho": 1.0, "interval": None})
    minus = "\N{MINUS SIGN}"
    assert f"over 5 layouts is {minus}0.90 (95 % interval {minus}1.00 to {minus}0.11), that of the NLL increase" in text
    assert f"before any training +1.00; {minus}1 and +1 would be perfect rankings." in text


def test_another_signal_is_said() -> None:
    inputs = Inputs.check(make_domain_table(metadata={"signal": "duo"}), {}, comparison=make_comparison())
    assert findings(inputs)[-1] == "Where this page says density, the table holds another signal, duo."
    assert "signal" not in say(make_comparison())


def test_close_result_is_called_close() -> None:
    text = say(make_comparison(delta_nll_standard_error=[np.nan, 0.1, 0.3, 0.3, 0.3]))
    assert "too close to call at less than two combined standard errors" in text
    assert "but no pair is more than two combined standard errors apart" in text


def test_wrong_ranking_is_said() -> None:
    text = say(make_comparison(coverage_percent=[100.0, 100.0, 2.9, 35.3, 47.1]))
    assert "The highest density coverage, 47.1 %, is that of spread; coverage puts 0 of 3 pairs" in text
    assert "and 0 of the 3 that are more than two combined standard errors apart" in text


def test_layouts_of_another_budget_do_not_compete() -> None:
    text = say(make_comparison(num_global=[np.nan, np.nan, 4, 2, 2]))
    assert text.startswith("last has the lowest NLL of 2 layouts with 2 of 8 KV heads global")


def test_missing_values_are_no_claims(tmp_path: Path) -> None:
    comparison = make_comparison()[["strategy", "nll"]]
    assert say(comparison) == "densest has the lowest NLL of 3 layouts: 2.0040 nats per token."
    unfinished = comparison.assign(nll=[2.0, *[np.nan] * 4])
    layouts = make_layouts("densest", "last")
    assert "None has been trained yet" in say(unfinished, layouts)
    assert "densest has the highest density coverage: 47.1 %" in say(unfinished, layouts)
    page = write_report(tmp_path, table=make_domain_table(), layouts=layouts, comparison=unfinished)
    text = page.read_text(encoding="utf-8")
    assert "—" in text
    assert not re.search(r"\bnan\b", text)


@pytest.mark.parametrize(
    ("comparison", "message"),
    [
        (pd.DataFrame({"nll": [1.0]}), "column 'strategy' is missing"),
        (make_comparison(strategy=["a", None, "b", "c", "d"]), "line 3: the strategy has no name"),
        (make_comparison(nll=[1.0, 2.0, "much", 1.0, 1.0]), "line 4: nll is 'much'; expected a number"),
    ],
    ids=["no-strategy", "no-name", "no-number"],
)
def test_unreadable_comparison_is_named(comparison: pd.DataFrame, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        say(comparison)


def test_layout_of_another_shape_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 layers x 2 KV heads"):
        write_report(tmp_path / "out", table=make_domain_table(), layouts={"small": Layout(("GL",), 8, "small")})
    assert not (tmp_path / "out").exists()


def test_colours_are_cividis_from_zero_to_one() -> None:
    assert cividis(1.0) == cividis(1.5) == ("#fee838", "#000")
    assert cividis(0.0) == cividis(-0.5) == ("#00224e", "#fff")
    cells = density_chart(make_domain_table()).marks[0]
    assert isinstance(cells, Heatmap)
    assert cells.values[1][1] == 0.6
    assert cells.tips[1 * 4 + 1] == "Layer 1, KV head 1: density 0.600\n1,000 tokens"


def test_error_bars_reach_one_standard_error() -> None:
    comparison = Inputs.check(make_domain_table(), {}, comparison=make_comparison()).comparison
    assert comparison is not None
    chart = coverage_nll_chart(comparison)
    assert chart is not None
    layouts, gates, full = [mark for mark in chart.marks if isinstance(mark, Points)]
    assert layouts.names == ("densest", "last", "spread")
    assert (layouts.x[0], layouts.y[0], layouts.error[0]) == (47.1, 0.2, 0.01)
    assert gates.shape != full.shape != layouts.shape
    assert math.isnan(full.error[0])
    frame, (ax,) = Frame.of(chart), draw(chart).axes
    (drawn,) = [
        path for path in ax.collections if np.allclose(path.get_paths()[0].vertices, [[47.1, 0.19], [47.1, 0.21]])
    ]
    assert drawn is not None
    assert frame.y(0.19) - frame.y(0.21) == pytest.approx(
        0.02 / (chart.y.high - chart.y.low) * (frame.bottom - frame.top)
    )


def test_labels_cover_no_mark_and_no_other_label() -> None:
    marks = [(100.0 + 3 * i, 100.0 + 2 * (i % 3)) for i in range(7)]
    taken: list[Box] = [(x - 7, y - 9, x + 7, y + 9) for x, y in marks]
    labels = place_labels(marks, ["strategy"] * 7, (0, 0, 400, 300), taken=taken, letter=6.6, line=15)
    width, height = 8 * 6.6, 15
    left = [label.x - (width if label.anchor == "end" else 0) for label in labels]
    for i in range(7):
        for k in range(i):
            assert abs(left[i] - left[k]) >= width - 1e-6 or abs(labels[i].y - labels[k].y) >= height - 1e-6
        for x, y in marks:
            assert not (left[i] < x < left[i] + width and abs(labels[i].y - y) < height / 2)


def test_names_of_baselines_lie_on_no_line() -> None:
    """They were written across the curves that ended where the baselines are."""
    names = ["one", "two", "three", "density-0-0", "density-0-1"]
    search = make_search(name=names, sampler=["baseline"] * 3 + ["density"] * 2, hash=list("abcde"),
                         zero_shot_delta_percent=[0.52, 0.51, 2.0, 2.0, 0.5])  # fmt: skip
    chart = progress_chart(search, None)
    frame = Frame.of(chart)
    labels = frame.labels()
    assert {label.text for label in labels} == {"one", "two", "three"}
    assert all(label.x > frame.right for label in labels)
    heights = sorted(label.y for label in labels)
    assert min(np.diff(heights)) >= 15 - 1e-6
    figure = draw(chart)
    (ax,) = figure.axes
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in ax.texts]  # without the leaders
    assert len(boxes) == 3
    assert all(box.x0 > ax.get_window_extent().x1 for box in boxes)
    assert all(box.x1 < figure.bbox.x1 for box in boxes)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_the_label_of_a_vertical_line_keeps_off_curves() -> None:
    axis = Axis("x", 0.0, 10.0, ())
    chart = Chart(
        "a", "", "", axis, axis, (Rule(5.0, "knee"), Line((0.0, 10.0), (9.9, 9.9)), Line((5.0, 9.0), (0.0, 9.0)))
    )

    def at(x: float, y: float) -> tuple[float, float]:
        return 40 * x, 200 - 20 * y

    assert chart_labels(chart, at, (0, 0, 400, 200), letter=6.6, line=15) == [Label(206, 15, "knee")]


def test_spread_places_keep_their_distance_and_move_least() -> None:
    assert spread([0.0, 50.0], 10) == [0.0, 50.0]
    assert spread([20.0, 20.0], 10) == [15.0, 25.0]
    assert spread([0.0, 1.0, 2.0, 100.0], 10) == pytest.approx([-9.0, 1.0, 11.0, 100.0])


def test_ticks_are_round() -> None:
    def shown(axis: Axis) -> list[str]:
        assert all(-1e-9 <= axis.fraction(value) <= 1 + 1e-9 for value, _ in axis.ticks)
        return [text for _, text in axis.ticks]

    assert shown(round_axis("", 0, 1)) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert shown(round_axis("", 0, 63, exact=True)) == ["0", "20", "40", "60"]
    assert shown(round_axis("", -0.13, 0.3)) == ["\N{MINUS SIGN}0.1", "0", "0.1", "0.2", "0.3"]
    assert round_axis("", 0, 4.05).high == pytest.approx(4.35)
    assert round_axis("", 0, 4, padded=True).low == pytest.approx(-0.3)
    assert shown(round_axis("", 2, 2)) == ["2", "2.2", "2.4", "2.6", "2.8", "3"]
    assert shown(decades_axis("", 3e18, 2e21, powers=True)) == ["10¹⁹", "10²⁰", "10²¹"]
    assert shown(decades_axis("", 0.04, 3, multiples=(1, 2, 5))) == ["0.05", "0.1", "0.2", "0.5", "1", "2"]
    assert shown(log_axis("", 1.9, 3.3)) == ["2", "2.25", "2.5", "2.75", "3", "3.25"]


AGREEMENT = pd.DataFrame({"first": ["a", "a", "b"], "second": ["b", "c", "c"], "budget": 2, "jaccard": [0.5, 0.1, 0.2],
                          "chance": 0.1, "spearman": [0.3, -0.2, math.nan]})  # fmt: skip
BUDGETS = pd.DataFrame({"budget": [1, 2, 3], "num_global": [1, 2, 3], "coverage": [0.4, 0.7, 1.0], "random": 0.5,
                        "worst_domain": 0.3, "coverage_low": [0.3, 0.6, 1.0], "coverage_high": [0.5, 0.8, 1.0],
                        "kv_bytes": [2.0**30, 2.0**31, 3 * 2.0**30]})  # fmt: skip
CURVES = pd.DataFrame(
    {
        "variant": ["full", "full", "sp-kv", "sp-kv"],
        "step": [10, 20] * 2,
        "loss": [9.0, 1.0, 8.0, 2.0],
        "mean_utility": [math.nan, math.nan, 0.9, 0.5],
        "density": [math.nan, math.nan, 1.0, 0.5],
    }
)


@pytest.mark.parametrize(
    "chart",
    [agreement_charts(AGREEMENT), budgets_chart(BUDGETS, 2, num_domains=2), palindrome_charts(CURVES, 2.3)],
    ids=lambda chart: chart.name,
)
def test_pictures_have_the_same_bytes_every_time(chart: Chart | Panels, tmp_path: Path) -> None:
    for run in ("one", "two"):
        save_chart(tmp_path / run, chart)
    for kind in ("png", "svg"):
        one, two = ((tmp_path / run / f"{chart.name}.{kind}").read_bytes() for run in ("one", "two"))
        assert one == two


def test_memory_stands_above_the_budgets() -> None:
    above = budgets_chart(BUDGETS, 2, num_domains=1).above
    assert above is not None
    assert [(round(value, 6), text) for value, text in above.ticks] == [
        (1.0, "1"),
        (1.5, "1.5"),
        (2.0, "2"),
        (2.5, "2.5"),
        (3.0, "3"),
    ]


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


def test_a_layout_may_be_called_as_a_missing_value(tmp_path: Path) -> None:
    """A layout named NA or null was read as one without a name."""
    write_comparison(
        tmp_path / "comparison.csv", make_comparison(strategy=["full-attention", "NA", "null", "nan", "a"])
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
        ("strategy,nll\na,2.0\nb,much\n", "line 3: column 'nll' must be a number from 0; found 'much'"),
    ],
    ids=["column", "name", "number"],
)
def test_an_unreadable_comparison_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "comparison.csv").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        read_comparison(tmp_path / "comparison.csv")


def test_budget_curve_ends_at_everything() -> None:
    curve = budget_curve(make_domain_table())
    assert curve is not None
    assert curve.iloc[-1, 1:].tolist() == pytest.approx([1.0] * 4)
    assert curve["interleaved-last"].notna().tolist() == [False, True] * 4
    assert curve.loc[1, "interleaved-last"] == pytest.approx(1.2 / 3.4)  # one layer: the last
    assert (curve["densest"] >= curve["random"] - 1e-12).all()


def test_profiles() -> None:
    table = make_domain_table(("code", "docs"), positions=make_positions())
    domains = domain_profile(table)
    assert domains["agreement"].tolist() == pytest.approx([1.0, 1.0])
    assert domains["num_tokens"].tolist() == [1000, 2000]
    positions = position_profile(table)
    assert positions is not None
    assert positions["mean"].tolist() == pytest.approx([0.05, 0.13])
    assert (positions["low"] <= positions["mean"]).all()
    assert position_profile(make_domain_table()) is None
