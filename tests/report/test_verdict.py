"""Test that the page's sentences, figures, tags, link, file and command agree, for random results."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import unescape
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import Page, make_comparison, make_domain_table, make_layouts, make_search
from marks import slow_after
from report_cases import make_evidence

from spkv_nas.artifacts.comparison import DENSE, FULL_ATTENTION
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report import page as report_page
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.page import write_report
from spkv_nas.report.verdict import Step, conclude

NUM_LAYERS, NUM_HEADS = 4, 2
BASELINES = {DENSE: "the dense model as it is", FULL_ATTENTION: "the control"}
VALUE = r"(?P<value>[\d.]+)(?: ± (?P<error>[\d.]+))? % (?P<side>above|below) (?P<baseline>[a-z ]+?)"
FIELD = r"of (?P<count>\d+) layouts with (?P<budget>\d+) of 8 KV heads global, (?P<how>[^:]+)"
LEADS = (
    rf"(?P<name>\S+) has the (?P<claim>lowest|lowest measured) NLL {FIELD}: {VALUE}\.",
    rf"No single best {FIELD}: (?P<tied>\d+) are not significantly different; (?P<name>\S+) is measured lowest, "
    rf"{VALUE}\.",
)
STANDINGS = {
    "tied": r"Not significantly different from it, within two standard errors of the difference",
    "unknown": r"Measured higher, though no standard error of the difference is known, so that the order is not "
    r"established",
    "behind": r"Significantly higher, by more than two standard errors of the difference",
}


@dataclass
class Case:
    """Results of a random project, and its competing layouts, lowest NLL first, by a separate oracle."""

    table: HeadScores
    layouts: dict[str, Layout]
    comparison: pd.DataFrame
    search: pd.DataFrame | None
    errors: dict[frozenset[str], float]
    ranked: list[tuple[str, float, float]]  # name, change, its error
    budget: int
    description: str
    baseline: str
    masks: dict[str, np.ndarray]

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.ranked]

    def pair_error(self, one: str, other: str) -> float:
        return self.errors.get(frozenset((one, other)), math.nan)

    def standing(self, index: int) -> str:
        (best, lowest, _), (name, delta, _) = self.ranked[0], self.ranked[index]
        error = self.pair_error(best, name) if self.description == "retrained for 40 steps" else math.nan
        return "unknown" if math.isnan(error) else "tied" if delta - lowest <= 2 * error else "behind"


def random_case(seed: int) -> Case:
    """Draw a comparison with or without the dense model, of one or two budgets, and in half of the cases a search."""
    rng = np.random.default_rng(seed)
    table = make_domain_table(density=rng.uniform(0.01, 1, (NUM_LAYERS, NUM_HEADS)).round(3))
    masks, layouts = {}, {}
    while len(masks) < 7:
        mask = np.zeros(8, bool)
        mask[rng.choice(8, 3 if len(masks) < 5 else 2, replace=False)] = True
        if not any((mask == other.ravel()).all() for other in masks.values()):
            masks[f"layout-{'abcdefg'[len(masks)]}"] = mask.reshape(NUM_LAYERS, NUM_HEADS)
    compared = [*masks][: rng.integers(2, 6)] + ([*masks][5:] if rng.random() < 0.3 else [])
    layouts = {name: Layout.from_mask(masks[name], window=8, strategy=name) for name in compared}
    # The comparison: NLL of everything, and changes that follow from it
    has_dense, scale = bool(rng.random() < 0.5), float(rng.choice([0.002, 0.05]))
    names = [*([DENSE] if has_dense else []), FULL_ATTENTION, *compared]
    nll = np.array(
        [*([2.0] if has_dense else []), 2.0 + 0.02 * rng.normal(), *2.01 + scale * rng.random(len(compared))]
    )
    base, control = nll[0], nll[names.index(FULL_ATTENTION)]
    comparison = pd.DataFrame(
        {
            "strategy": names,
            "nll": nll,
            "delta_nll_percent": 100 * (nll / base - 1),
            "delta_nll_standard_error": rng.uniform(0.001, 0.3, len(names)).round(4),
            "delta_control_percent": 100 * (nll / control - 1),
            "delta_control_standard_error": 0.1,
            "coverage_percent": [100 * coverage(table, layouts[name]) if name in layouts else 100.0 for name in names],
            "density_percent": [100 * masks[name].mean() if name in layouts else 100.0 for name in names],
            "num_global": [masks[name].sum() if name in layouts else math.nan for name in names],
            "num_seeds": 1,
            "steps": [0.0 if name == DENSE else 40.0 for name in names],
        }
    )
    kinds = rng.random((len(compared),) * 2)
    errors = {
        frozenset((one, other)): math.nan if kinds[i, k] < 0.2 else float(rng.choice([0.001, 0.05, 1.0]))
        for (i, one), (k, other) in combinations(enumerate(compared), 2)
    }
    if (kind := rng.random()) < 0.4:  # all are known to differ, or nothing is known
        errors = dict.fromkeys(errors, 0.0005) if kind < 0.25 else {}
    search = random_search(rng, masks) if rng.random() < 0.5 else None
    # The oracle: full retraining of several layouts in the search, or else the comparison
    mode = pd.Series([masks[name].sum() for name in compared]).mode().max()
    rows = comparison[comparison["strategy"].isin([name for name in compared if masks[name].sum() == mode])]
    columns, description, baseline = (
        ("delta_nll_percent", "delta_nll_standard_error"),
        "retrained for 40 steps",
        names[0],
    )
    if search is not None and search["full_delta_percent"].notna().sum() > 1:
        rows = search.dropna(subset="full_delta_percent").rename(columns={"name": "strategy"})
        columns, baseline, mode = ("full_delta_percent", "full_standard_error"), FULL_ATTENTION, 3
        description = "retrained for 120 steps, on held-out documents not used for selection"
    elif len(rows) < 2:
        return random_case(seed + 1000)  # the longest retraining of several layouts may be the short one
    ordered = rows.sort_values(columns[0], kind="stable")
    ranked = [(str(row["strategy"]), float(row[columns[0]]), float(row[columns[1]])) for _, row in ordered.iterrows()]
    return Case(table, layouts, comparison, search, errors, ranked, int(mode), description, baseline, masks)


def random_search(rng: np.random.Generator, masks: dict[str, np.ndarray]) -> pd.DataFrame:
    """Draw layouts of one budget, of which some were retrained."""
    chosen = [name for name in masks if masks[name].sum() == 3]
    heads = [" ".join("".join("G" if one else "L" for one in row) for row in masks[name]) for name in chosen]
    has_error = rng.random(5) < 0.6
    full = np.where(has_error, rng.uniform(0.1, 2, 5), math.nan)
    return make_search(
        name=chosen,
        hash=chosen,
        heads=heads,
        full_delta_percent=full,
        full_standard_error=np.where(has_error, 0.1, math.nan),
    )  # type: ignore[arg-type]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], str]:
    """Write the page of a case and return its HTML."""
    monkeypatch.setattr(report_page, "save_chart", lambda *_: None)

    def written(case: Case) -> str:
        file = write_report(
            tmp_path,
            ReportInputs(
                case.table,
                case.layouts,
                comparison=case.comparison,
                search=case.search,
                search_record={"steps": {"short": 30, "full": 120}, "window": 8},
                pair_error=case.pair_error,
            ),
            advise=lambda verdict: [Step("Go on:", f"spkv-nas go-on {verdict.layout and verdict.layout.name}")],
        )
        return file.read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-")

    return written


def texts(html: str, pattern: str) -> list[str]:
    """Return the texts of the elements that match a pattern, without their tags."""
    return [unescape(re.sub("<[^>]*>", "", result)).strip() for result in re.findall(pattern, html, re.DOTALL)]


@pytest.mark.parametrize("seed", slow_after(8, range(50)))
def test_every_claim_of_the_page_follows_from_its_tables(write: Callable[[Case], str], seed: int) -> None:
    case = random_case(seed)
    html = write(case)
    body = html[: html.index('<script type="application/json"')]
    check_lead(case, texts(body, '<p class="lead">(.*?)</p>')[0])
    check_standings(case, texts(body, "<p>(.*?)</p>"))
    check_layout(case, html)
    check_tags(case, body)
    check_ranking(case, texts(body, "<p>(.*?)</p>"))
    claims = re.findall("lowest NLL|lowest measured NLL|measured lowest", re.sub("<[^>]*>", "", body))
    assert len(claims) == 2, claims  # the headline, and the tag of its layout


def check_lead(case: Case, lead: str) -> None:
    """Check best layout, count, budget, measure, value and baseline of the headline, and its certainty."""
    sentence = next(match for match in (re.fullmatch(pattern, lead) for pattern in LEADS) if match)
    best, delta, error = case.ranked[0]
    standings = [case.standing(index) for index in range(1, len(case.ranked))]
    assert (sentence["name"], int(sentence["count"]), int(sentence["budget"])) == (best, len(case.ranked), case.budget)
    assert (sentence["how"], sentence["baseline"]) == (case.description, BASELINES[case.baseline])
    assert (sentence["value"], sentence["error"]) == (f"{abs(delta):.3f}", f"{error:.3f}")
    assert sentence["side"] == ("below" if delta < 0 else "above")
    if "tied" in sentence.re.groupindex:
        assert int(sentence["tied"]) == 1 + standings.count("tied") > 1
    else:
        assert "tied" not in standings
        assert (sentence["claim"] == "lowest") == (set(standings) <= {"behind"})


def check_standings(case: Case, paragraphs: list[str]) -> None:
    """Check that every other layout is in one list, in order of its NLL, with its difference and standard error."""
    best = case.ranked[0]
    for standing, words in STANDINGS.items():
        expected = [case.ranked[index] for index in range(1, len(case.ranked)) if case.standing(index) == standing]
        actual = [
            match for text in paragraphs if (match := re.match(rf"{words}, in percentage points: (.*?)\.( N|$)", text))
        ]
        assert len(actual) == bool(expected), standing
        if not expected:
            continue
        items = actual[0][1].split(", ")
        more = re.fullmatch(r"and (\d+) more", items[-1])
        assert len(items) - bool(more) + (int(more[1]) if more else 0) == len(expected)
        for item, (name, delta, _) in zip(items[: len(items) - bool(more)], expected, strict=False):
            error = case.pair_error(best[0], name)
            uncertainty = "" if standing == "unknown" else f" ± {error:.3f}"
            assert item == f"{name} {delta - best[1]:+.3f}{uncertainty}"


def check_layout(case: Case, html: str) -> None:
    """Check that link, top figures, the explorer's first layout, its file and the command are of the best layout."""
    name, delta, error = case.ranked[0]
    mask = case.masks[name]
    layout = Layout.from_mask(mask, window=8, strategy=name)
    data: Any = json.loads(html.split('id="data">')[1].split("</script>")[0])["explorer"]
    (index, linked), *others = re.findall(r'<a href="#density" data-layout="(\d+)">(.*?)</a>', html)
    assert (int(index), linked, others) == (data["start"], name, [])
    assert data["layouts"][data["start"]][0] == name
    called, covered, layout_hash, before, after = data["files"][data["start"]]
    assert (called, layout_hash) == (name, layout.hash)
    assert float(covered) == pytest.approx(100 * coverage(case.table, layout), abs=0.005)
    assert (f"strategy: {name}\n" in after, "window: 8" in before) == (True, True)
    tiles = list(
        zip(texts(html, r"<li><strong>(.*?)</strong>"), texts(html, r"</strong><span>(.*?)</span>"), strict=True)
    )
    assert tiles[2] == (f"{100 * coverage(case.table, layout):.1f} %", f"density coverage of {name}")
    assert tiles[3] == (f"{delta:+.3f} %", f"± {error:.3f}, NLL of {name} against {BASELINES[case.baseline]}")
    assert texts(html, r'<code id="next-1">(.*?)</code>') == [f"spkv-nas go-on {name}"]


def check_tags(case: Case, body: str) -> None:
    """Check that in the deciding table only the best and the layouts not significantly different have a tag."""
    rows = re.findall(r'<th scope="row">([^<]*)<span class="tag">(.*?)</span>', body)
    tied = {case.names[index] for index in range(1, len(case.ranked)) if case.standing(index) == "tied"}
    assert {name for name, tag in rows if tag.startswith("lowest")} == {case.names[0]}
    assert {name for name, tag in rows if tag == "not significantly different"} == tied
    assert len(rows) == 1 + len(tied)


def check_ranking(case: Case, paragraphs: list[str]) -> None:
    """Check coverage, and the pairs that it orders like their NLL."""
    result = [
        match
        for text in paragraphs
        if (
            match := re.match(
                r"(\S+) has the highest density coverage, ([\d.]+) %; coverage puts (\d+) of (\d+) pairs .*? NLL, "
                r"(?:and (?:all|(\d+) of the) (\d+) that are|but no pair is|of which no standard error)",
                text,
            )
        )
    ]
    masks = {name: case.masks[name] for name in case.layouts}
    mode = pd.Series([mask.sum() for mask in masks.values()]).mode().max()
    rows = case.comparison[[name in masks and masks[name].sum() == mode for name in case.comparison["strategy"]]]
    if len(rows) < 2:
        assert not result
        return
    (sentence,) = result
    widest = rows.loc[rows["coverage_percent"].idxmax()]
    pairs = [(one, other) for (_, one), (_, other) in combinations(rows.iterrows(), 2)]
    agrees = [
        (one["coverage_percent"] > other["coverage_percent"]) == (one["nll"] < other["nll"]) for one, other in pairs
    ]
    clear = [
        abs(one["delta_nll_percent"] - other["delta_nll_percent"])
        > 2 * case.pair_error(one["strategy"], other["strategy"])
        for one, other in pairs
    ]
    assert (sentence[1], sentence[2]) == (widest["strategy"], f"{widest['coverage_percent']:.1f}")
    assert (int(sentence[3]), int(sentence[4])) == (sum(agrees), len(pairs))
    if sentence[6] is not None:
        right = sum(one and other for one, other in zip(agrees, clear, strict=True))
        assert (int(sentence[5] or sentence[6]), int(sentence[6])) == (right, sum(clear))
    else:
        assert not any(clear)


def test_errors_of_layouts_on_the_same_documents_are_paired() -> None:
    verdict = conclude(make_evidence())
    assert verdict.lead[1] == "density-0-1"
    assert verdict.standings == ("unknown", "unknown")
    assert "±" not in " ".join(verdict.sentences)


def test_before_training_the_page_is_of_the_widest_layout() -> None:
    verdict = conclude(ReportInputs(make_domain_table(), make_layouts("densest", "last")))
    assert "".join(verdict.lead) == (
        "Of 2 layouts with 2 of 8 KV heads global, densest has the highest density coverage: 47.1 %."
    )
    assert verdict.sentences == ["No layout has been retrained yet, so it is not known which has the lowest NLL."]


def test_the_dense_model_is_a_row_and_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes count from it, not from the control, which retraining may harm."""
    monkeypatch.setattr(report_page, "save_chart", lambda *_: None)
    comparison = pd.concat(
        [
            pd.DataFrame({"strategy": [DENSE], "nll": [1.98], "density_percent": 100.0, "coverage_percent": 100.0}),
            make_comparison(delta_nll_percent=[1.0, 1.06, 1.2, 1.3, 1.5]),
        ]
    )
    file = write_report(tmp_path, ReportInputs(make_domain_table(), make_layouts("densest"), comparison=comparison))
    html = file.read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    page = Page(html)
    assert any(
        "The control, full attention retrained like the layouts, is 1.000 % above the dense" in text
        for text in page.texts["p"]
    )
    assert "1.200 ± 0.010 % above the dense model as it is" in texts(html, '<p class="lead">(.*?)</p>')[0]
    heads = texts(html, r"<thead><tr>(<th scope=\"col\">Strategy.*?)</tr>")[0]
    assert heads.startswith("StrategyΔ NLL, %Δ NLL against control, %")
    rows = [text for text in page.texts["th"] if text.startswith(("dense,", "full-attention"))]
    assert rows == ["full-attention, the control", "dense, as it is"]
    charts = json.loads(html.split('id="data">')[1].split("</script>")[0])["charts"]
    for chart in ("coverage-nll", "cache-nll"):
        assert {mark.get("label") for mark in charts[chart]["marks"]} >= {"layout", "control", "dense model as it is"}


def test_nll_is_drawn_against_bytes_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "save_chart", lambda *_: None)
    table = make_domain_table(metadata={"head_dim": 16, "dtype": "bfloat16"})
    file = write_report(tmp_path, ReportInputs(table, make_layouts("densest", "last"), comparison=make_comparison()))
    chart = json.loads(file.read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0])["charts"][
        "cache-nll"
    ]
    points = next(mark for mark in chart["marks"] if mark.get("label") == "layout")
    mib = 2 * 16 * 2 * (2 * 131072 + 6 * 8) / 2**20  # two of eight heads hold all tokens, the others their window
    assert points["x"] == pytest.approx([mib] * 3, rel=1e-4)
    assert points["y"] == [0.2, 0.3, 0.5]


def test_no_table_is_shown_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts of a search are in one table."""
    monkeypatch.setattr(report_page, "save_chart", lambda *_: None)
    case = make_evidence()
    file = write_report(
        tmp_path,
        ReportInputs(case.table, dict(case.layouts), comparison=case.comparison, search=case.search),
    )
    page = Page(file.read_text(encoding="utf-8"))
    assert [table.get("id") for table in page.all("table")].count("measured-all") == 1
    assert "Measured layouts" not in page.texts["h2"]
    assert sum("density-0-1" in text for text in page.texts["th"]) == 1


def test_terms_are_explained_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "save_chart", lambda *_: None)
    case = make_evidence()
    file = write_report(
        tmp_path,
        ReportInputs(case.table, dict(case.layouts), comparison=case.comparison, search=case.search),
    )
    page = Page(file.read_text(encoding="utf-8"))
    meanings = {definition["id"] for definition in page.all("dd") if str(definition.get("id")).startswith("word-")}
    terms = {str(link["href"])[1:] for link in page.all("a") if link.get("class") == "term"}
    words = ("measure", "coverage", "tau", "budget", "window", "delta", "control", "dense", "layout")
    assert terms == {f"word-{word}" for word in words}
    assert terms <= meanings
