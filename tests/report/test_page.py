"""Test the report's page: what it says, and that no name in it is executed."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import (
    DENSITY,
    Page,
    make_comparison,
    make_domain_table,
    make_layouts,
    make_positions,
    make_search,
    unsaved_pictures,
)

from spkv_nas.artifacts.comparison import read_comparison, write_comparison
from spkv_nas.artifacts.kinds import NATS
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.prediction_check import PredictionCheck
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.search_table import read_search
from spkv_nas.base.errors import UserError
from spkv_nas.report.chart import Axis, Chart, Line, Panels, Points
from spkv_nas.report.inputs import PairError, ReportInputs, ResultFile
from spkv_nas.report.page import page_data, write_report
from spkv_nas.report.result_charts import front_chart, search_charts, write_study_figures
from spkv_nas.report.tables import findings, search_findings, search_rows
from spkv_nas.report.verdict import conclude

HOSTILE = "<script>alert(1)</script>"
QUOTED = "\"'><img src=x onerror=alert(1)>"


def say(
    comparison: pd.DataFrame | None,
    layouts: dict[str, Layout] | None = None,
    pair_error: PairError = lambda first, second: math.nan,
    **record: Any,
) -> str:
    inputs = ReportInputs(
        make_domain_table(),
        layouts or {},
        comparison=comparison,
        record=record,
        pair_error=pair_error,
    )
    verdict = conclude(inputs)
    return " ".join(["".join(verdict.lead), *verdict.sentences, *findings(inputs.record)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with unsaved_pictures():
        return write_hostile(tmp_path_factory.mktemp("report"))


def write_hostile(folder: Path) -> Path:
    """Write a report in which every name that a user chooses is hostile."""
    names = ("<script>alert(1)<script>", QUOTED, "=cmd()$a_b$ 漢字")
    table = make_domain_table(
        (HOSTILE, QUOTED),
        positions=make_positions(),
        record=ProbeRecord.of({HOSTILE: {QUOTED: [HOSTILE, 1]}}),
    )
    write_report(
        folder,
        ReportInputs(
            replace(table, name=HOSTILE),
            make_layouts(*names),
            comparison=make_comparison(
                strategy=["full-attention", "sp-kv", *names],
                note=["", "", HOSTILE, QUOTED, "+1\x07"],
            ),
            record={"rank_correlation": {"rho": -1.0, "layouts": 3}, QUOTED: HOSTILE},
            search=make_search(name=[HOSTILE, QUOTED, "b", "c", "d"]),
        ),
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
    assert not page.all("img", "link", "iframe", "object", "foreignobject")
    assert {use["href"] for use in page.all("use")} == {"#density-cells"}  # of the page itself
    for _, attributes in page.elements:
        assert not [
            name for name in attributes if name.startswith("on") or name in ("src", "style")
        ]
    for link in page.all("a"):
        if link.get("id") == "explorer-download":  # the script gives it an address
            continue
        assert re.match(r"#[a-z-]+$|[a-z-]+\.(png|svg|pdf)$", link["href"] or "")


def test_names_appear_as_text(page: Page) -> None:
    assert any(HOSTILE in text for text in page.texts["th"])
    assert any(QUOTED in text for text in page.texts["h3"])
    assert any(HOSTILE in text for text in page.texts["dd"])
    assert HOSTILE in json.loads(page.texts["script"][0])["explorer"]["signals"][0]["domains"]
    assert any(HOSTILE in tip for mark in data(page)["domains"] for tip in mark["tips"])


def data(page: Page) -> dict[str, Any]:
    charts: dict[str, Any] = json.loads(page.texts["script"][0])["charts"]
    return charts


def test_data_cannot_end_its_element(page: Page) -> None:
    """A domain may have the name of the closing tag."""
    assert "<" not in page.texts["script"][0]
    axis = Axis("", 0.0, 1.0, ())
    text = page_data([Chart("a", "", axis, axis, (Points((np.pi,), (math.nan,), tips=("<!--",)),))])
    assert "<" not in text
    assert json.loads(text)["charts"]["a"] == [{"tips": ["<!--"]}]


def test_every_chart_shows_its_data(page: Page) -> None:
    drawn = [svg["data-chart"] for svg in page.all("svg") if "data-chart" in svg]
    # Of the explorer's data
    maps = {
        "density",
        *(name for name in map(str, drawn) if name.startswith("layout-")),
    }
    assert sorted({str(name) for name in drawn} - maps) == sorted(data(page))
    chart: Any = None
    places = dict.fromkeys(drawn, 0)
    for tag, attributes in page.elements:
        if tag == "svg":
            chart = attributes.get("data-chart")
        if "data-mark" in attributes:
            number, index = map(int, (attributes["data-mark"] or "").split(","))
            mark = data(page)[chart][number]
            assert mark["tips"][index]
            places[chart] += 1
    assert places["histogram"] == 20
    assert places["domains"] == 2 * (8 + 1)


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
    inputs = ReportInputs(make_domain_table(), {}, search=search)
    table = search_rows(inputs)
    assert table is not None
    _, (rows,) = table
    assert [row.head for row in rows] == ["density-0-1", "densest", "random-0-1", "random-0-0"]
    assert rows[0].cells == ("+0.400 ± 0.100", "+0.600 ± 0.100", "+0.500 ± 0.100", "3", "50.0")
    (retrained,) = search_charts(search, None)
    assert isinstance(retrained, Panels)
    shown = [mark for mark in retrained.charts[0].marks if isinstance(mark, Points)]
    assert [(mark.label, len(mark.x)) for mark in shown] == [
        ("baseline", 1),
        ("density", 1),
        ("random", 1),
    ]
    assert len(search_charts(make_search(cost=[4.0, 4.0, 5.0, 3.0, 6.0]), "cost")) == 2
    assert search_findings(inputs)[0].startswith("Rank correlation of ")
    assert search_findings(replace(inputs, search_record={"num_documents": 7})) == []
    assert "Search" in page.texts["h2"]


def test_figures_of_a_search_follow_its_data(tmp_path: Path) -> None:
    write_study_figures(tmp_path, make_search(cost=[4.0, 4.0, 5.0, 3.0, 6.0]), "seconds")
    names = {"search-retrained", "search-front"}
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("png", "svg", "pdf")
    }
    write_study_figures(tmp_path, make_search(full_delta_percent=[math.nan] * 5), None)
    assert list(tmp_path.iterdir()) == []


def test_the_front_is_a_staircase() -> None:
    chart = front_chart(make_search(cost=[4.0, 4.0, 5.0, 3.0, 6.0]), "cost")
    density, random = [mark for mark in chart.marks if isinstance(mark, Line)]
    assert (density.x, density.y) == ((4.0, 5.0, 5.0, 6.0), (0.9, 0.9, 0.5, 0.5))
    assert (random.x, random.y) == ((3.0, 6.0, 6.0, 6.0), (2.0, 2.0, 1.5, 1.5))


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (make_search().drop(columns="hash"), "column 'hash' is missing"),
        (make_search(cost=["x"] * 5), "line 2: column 'cost' must be a number in .* found 'x'"),
    ],
    ids=["column", "number"],
)
def test_an_unreadable_search_is_named(tmp_path: Path, search: pd.DataFrame, message: str) -> None:
    search.to_csv(tmp_path / "search.csv", index=False)
    with pytest.raises(UserError, match=message):
        read_search(tmp_path / "search.csv")


def test_global_heads_are_marked_by_shape(page: Page) -> None:
    outlines = [path["d"] or "" for path in page.all("path") if path.get("class") == "chosen"]
    assert sum(path.count("M") for path in outlines) == sum(
        layout.num_global for layout in make_layouts("a", "b", "c").values()
    )


@pytest.mark.slow
def test_figures_are_well_formed_and_the_same_every_time(tmp_path: Path) -> None:
    folder = write_hostile(tmp_path / "hostile")
    names = {
        "density",
        "layouts",
        "cache-nll",
        "coverage-nll",
        "coverage-budget",
        "domains",
        "positions",
        "histogram",
    }
    files = {f"{name}.{suffix}" for name in names for suffix in ("png", "svg", "pdf")}
    assert {path.name for path in folder.iterdir()} == {"index.html"} | files
    for path in folder.glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        assert not [element for element in root.iter() if element.tag.endswith(("script", "date"))]
        links = [
            value
            for element in root.iter()
            for key, value in element.attrib.items()
            if key.endswith("href")
        ]
        assert all(link.startswith(("#", "data:image/png")) for link in links)
    table = make_domain_table()
    for run in ("one", "two"):
        write_report(
            tmp_path / run,
            ReportInputs(table, make_layouts("densest"), comparison=make_comparison()),
        )
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_report_without_training_or_layouts(tmp_path: Path) -> None:
    closed = make_domain_table(density=np.zeros((4, 2)))
    text = write_report(tmp_path, ReportInputs(closed, {})).read_text(encoding="utf-8")
    Page(text)
    assert "The mean density of 8 KV heads is 0.0, in % of tokens kept." in text.replace(
        "\u00a0", " "
    )
    assert "Caution." in text
    assert not (tmp_path / "coverage-nll.svg").exists()


def test_result_comes_first() -> None:
    text = say(
        make_comparison(),
        pair_error=lambda *_: 0.01,
        rank_correlation={"rho": -1.0, "p_value": 0.0, "layouts": 3},
    )
    assert text.startswith(
        "densest: 2 of 8 KV heads global, 75.0 % less KV cache at 131,072 tokens; NLL +0.200 ± 0.010 % against the "
        "control, retrained for 100 steps. It has the lowest NLL of 3 layouts with as many global heads: the others "
        "are behind by more than two standard errors. "
    )
    assert "over 3 layouts is \N{MINUS SIGN}1.00" in text


def test_rank_correlations_come_with_their_intervals() -> None:
    coverage = {"rho": -0.9, "layouts": 9, "interval": [-1.0, -0.11]}
    text = say(
        make_comparison(),
        rank_correlation=coverage,
        zero_shot_rank_correlation={"rho": 1.0, "interval": None},
    )
    minus = "\N{MINUS SIGN}"
    assert (
        f"over 9 layouts is {minus}0.90 (95 % interval {minus}1.00 to {minus}0.11), that of the NLL increase"
        in text
    )
    assert f"before any training +1.00; {minus}1 and +1 would be perfect rankings." in text
    few = {"rho": 1.0, "p_value": 0.0167, "layouts": 5, "interval": [1.0, 1.0]}
    assert "over 5 layouts is +1.00 (p = 0.017)" in say(make_comparison(), rank_correlation=few)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (
            {"signal": "add-one-head", "kind": "gain", "unit": NATS},
            (
                "0.02400",
                "add-one-head gain",
                "Add-one-head gain, nats per token / 1,000",
                "Add-one-head gain coverage",
            ),
        ),
        (
            {"signal": "duo", "kind": "share"},
            ("0.02400", "duo score", "Duo score, %", "duo score coverage of densest"),
        ),
    ],
    ids=["add-one-head", "duo"],
)
def test_another_signal_has_its_terms(
    tmp_path: Path, metadata: dict[str, str], words: tuple[str, ...]
) -> None:
    table = make_domain_table(("a", "b"), 0.04 * DENSITY, record=ProbeRecord.of(metadata))
    page = Page(
        write_report(tmp_path, ReportInputs(table, make_layouts("densest"))).read_text(
            encoding="utf-8"
        )
    )
    visible = [
        text.replace("\u00a0", " ")
        for tag, texts in page.texts.items()
        if tag != "style"
        for text in texts
    ]
    visible += [attributes.get("aria-label") or "" for _, attributes in page.elements]
    assert [word for word in words if not any(word in text for text in visible)] == []
    own_names = r"density\.csv|data-chart=density|density: $|mean_density"  # of files, a chart, and a key of the record
    assert [text for text in visible if "densit" in re.sub(own_names, "", text).lower()] == []


@pytest.mark.parametrize(
    ("correlation", "reliability", "sentence"),
    [
        (
            0.2,
            1.0,
            "Costs of windows are no guide for this model on this text: their rank correlation with the losses",
        ),
        (
            0.9,
            1.0,
            "Costs of windows: their rank correlation with the losses of 3 random layouts is 0.90",
        ),
        (
            0.2,
            0.1,
            "Costs of windows could not be checked: the losses of 3 random layouts of 25 % of the KV cache",
        ),
    ],
    ids=["failed", "passed", "undecided"],
)
def test_the_check_of_window_costs_has_a_section(
    tmp_path: Path, correlation: float, reliability: float, sentence: str
) -> None:
    check = PredictionCheck(
        0.25, 8, (0.1, 0.2, 0.3), (0.2, 0.4, 0.6), correlation, 2.0, reliability
    )
    table = make_domain_table(record=ProbeRecord.of({"prediction_check": check.as_mapping()}))
    page = Page(write_report(tmp_path, ReportInputs(table, {})).read_text(encoding="utf-8"))
    assert "Predicted and measured losses" in page.texts["h2"]
    assert [
        text for text in page.texts["p"] if text.replace("\u00a0", " ").startswith(sentence)
    ] != []


def test_no_check_of_window_costs_has_no_section(tmp_path: Path) -> None:
    page = Page(
        write_report(tmp_path, ReportInputs(make_domain_table(), {})).read_text(encoding="utf-8")
    )
    assert "Predicted and measured losses" not in page.texts["h2"]


def test_a_close_result_is_called_close() -> None:
    """No winner is named within two standard errors."""
    text = say(make_comparison(), pair_error=lambda *_: 0.06)
    assert "No single best of 3 layouts with as many global heads: it is measured lowest" in text
    assert (
        "by more than two standard errors of the difference, in percentage points: last +0.100 ± 0.060. None"
        in text
    )


def test_few_documents_need_a_wider_margin() -> None:
    """With an effective number of 4 documents, 95 % takes 3.2 standard errors (t with 3 degrees of freedom)."""
    comparison = make_comparison()  # last is .1 points behind densest
    assert "No single best" not in say(comparison, pair_error=lambda *_: 0.035)
    text = say(
        comparison,
        pair_error=lambda *_: 0.035,
        heldout={"documents": 8, "effective_documents": 4.0},
    )
    assert "No single best of 3 layouts" in text
    assert (
        "by more than 3.2 standard errors (few documents) of the difference, in percentage points: last"
        in text
    )


def test_too_few_documents_rank_nothing() -> None:
    """A page called the lowest of 5 layouts that were retrained and measured on 2 documents the best."""
    layouts = make_layouts("densest", "last")
    text = say(make_comparison(), layouts, pair_error=lambda *_: 0.001, heldout={"documents": 7})
    assert (
        "its loss has not been measured on enough documents. The comparison measured on 7 documents, too few"
        in text
    )
    assert not re.search("lowest|best", text)


def test_errors_of_both_bound_the_error_of_their_difference() -> None:
    """Where only the error of each layout is known, a layout is behind by more than twice the sum, or not clearly."""
    assert "It has the lowest NLL of 3 layouts" in say(make_comparison())  # .1 apart, .01 each
    assert "last +0.100 ± —, spread" in say(
        make_comparison(delta_nll_standard_error=[np.nan, 0.01, 0.2, 0.2, 0.2])
    )


def test_layouts_of_another_budget_do_not_compete() -> None:
    text = say(make_comparison(num_global=[np.nan, np.nan, 4, 2, 2]))
    assert text.startswith("last: 2 of 8 KV heads global, ")
    assert "lowest NLL of 2 layouts" in text


def test_a_single_document_has_no_standard_error(tmp_path: Path) -> None:
    """Nor are layouts told apart by it."""
    comparison = make_comparison(delta_nll_standard_error=np.nan)
    assert "No single best of 3 layouts" in say(comparison)
    write_comparison(tmp_path / "comparison.csv", comparison)
    assert read_comparison(tmp_path / "comparison.csv")["delta_nll_standard_error"].isna().all()
    page = write_report(
        tmp_path, ReportInputs(make_domain_table(), make_layouts("densest"), comparison=comparison)
    )
    assert "+0.200 ± —" in page.read_text(encoding="utf-8").replace("\u00a0", " ")
    assert not re.search(r"\bnan\b", page.read_text(encoding="utf-8"))


def test_missing_values_make_no_claims(tmp_path: Path) -> None:
    comparison = make_comparison()[["strategy", "nll"]]
    assert say(comparison).startswith(
        "densest: NLL 2.0040 nats per token, retrained. No single best of 3 layouts"
    )
    unfinished = comparison.assign(nll=[2.0, *[np.nan] * 4])
    layouts = make_layouts("densest", "last")
    text = say(unfinished, layouts)
    assert (
        "its loss has not been measured. It was proposed by density: its global heads have 47.1 % of the sum"
        in text
    )
    text = write_report(
        tmp_path, ReportInputs(make_domain_table(), layouts, comparison=unfinished)
    ).read_text("utf-8")
    assert "—" in text
    assert not re.search(r"\bnan\b", text)


@pytest.mark.parametrize(
    ("comparison", "message"),
    [
        (pd.DataFrame({"nll": [1.0]}), "column 'strategy' is missing"),
        (make_comparison(strategy=["a", None, "b", "c", "d"]), "line 3: the strategy has no name"),
        (
            make_comparison(nll=[1.0, 2.0, "much", 1.0, 1.0]),
            "line 4: nll is 'much'; expected a number",
        ),
    ],
    ids=["no-strategy", "no-name", "no-number"],
)
def test_unreadable_comparison_is_named(comparison: pd.DataFrame, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        say(comparison)


def test_layout_of_another_shape_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 layers x 2 KV heads"):
        write_report(
            tmp_path / "out",
            ReportInputs(make_domain_table(), {"small": Layout(("GL",), 8, "small")}),
        )
    assert not (tmp_path / "out").exists()


def test_a_layout_of_several_windows(tmp_path: Path) -> None:
    """It is compared at equal memory, and stays out of the explorer, whose layouts have two letters."""
    several = Layout(("GM", "LM", "LM", "LM"), windows={"L": 8, "M": 128}, strategy="several")
    layouts = {**make_layouts("densest", "last"), "several": several}
    scores = pd.DataFrame(
        {"strategy": [*layouts], "heads": [each.words for each in layouts.values()], "nll": 2.0}
    )
    scores = scores.assign(delta_nll_percent=[0.9, 2.0, 0.2], delta_nll_standard_error=0.1)
    file = ResultFile(
        tmp_path / "zero-shot.csv",
        scores,
        {"num_documents": 60, "windows": {"densest": 8, "last": 8}},
    )
    inputs = ReportInputs(
        make_domain_table(record=ProbeRecord.of({"positions": 512})), layouts, scores=(file,)
    )
    # The verdict
    verdict = conclude(inputs)
    lead = "several: 1 of 8 KV heads global, windows L 8, M 128, 74.4 % less KV cache at 512 tokens; NLL +0.200"
    assert "".join(verdict.lead).startswith(lead)
    assert verdict.sentences[0].startswith(
        "It has the lowest NLL of 3 layouts with as much memory: the others"
    )
    # The page
    html = write_report(tmp_path, inputs).read_text("utf-8")
    assert "1 of 8 heads global, windows L 8, M 128, 25.6 % of the KV cache at 512 tokens" in html
    explorer = json.loads(html.split('id="data">')[1].split("</script>")[0])["explorer"]
    assert [name for name, _ in explorer["layouts"]] == ["densest", "last"]
    drawn = html.split('data-chart="layout-3"')[1].split("</svg>")[0]
    assert sorted(re.findall(r">([GLM])</tspan>", drawn)) == [*"LLLMMMM"]
    assert not re.search(r"\bnan\b", html)
