"""Test that the page's sentences, figures, tags, link, file and command agree, for random results."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from spkv_nas.artifacts.displacement import COLUMNS
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.result_tables import SCORES
from spkv_nas.artifacts.result_tables import VERDICT as VERDICT_TABLE
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report import page as report_page
from spkv_nas.report.chart import Points
from spkv_nas.report.evidence import all_evidence
from spkv_nas.report.inputs import ReportInputs, ResultFile
from spkv_nas.report.layout_explorer import explorer_data
from spkv_nas.report.page import write_report
from spkv_nas.report.result_charts import cache_nll_chart
from spkv_nas.report.verdict import Step, conclude

NUM_LAYERS, NUM_HEADS = 4, 2
BASELINES = {DENSE: "the dense model as it is", FULL_ATTENTION: "the control"}
LEAD = (
    r"(?P<name>\S+): (?P<budget>\d+) of 8 KV heads global, (?P<saved>[\d.]+) % less KV cache at 131,072 tokens; "
    r"NLL (?P<value>[+-][\d.]+) ± (?P<error>[\d.]+) % against (?P<baseline>[a-z ]+?), (?P<how>[^:]+)\."
)
COMPETITION = (
    r"It has the lowest NLL of (?P<clear>\d+) layouts with as many global heads: the others are behind by .*",
    r"No single best of (?P<open>\d+) layouts with as many global heads: it is measured lowest; not behind by more "
    r"than two standard errors of the difference, in percentage points: (?P<close>.*?)\.( N.*|$)",
)


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
        error = (
            self.pair_error(best, name)
            if self.description == "retrained for 40 steps"
            else math.nan
        )
        if math.isnan(error):  # at most the sum of both
            return (
                "behind"
                if delta - lowest > 2 * (self.ranked[0][2] + self.ranked[index][2])
                else "unknown"
            )
        return "tied" if delta - lowest <= 2 * error else "behind"


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
        [
            *([2.0] if has_dense else []),
            2.0 + 0.02 * rng.normal(),
            *2.01 + scale * rng.random(len(compared)),
        ]
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
            "coverage_percent": [
                100 * coverage(table, layouts[name]) if name in layouts else 100.0 for name in names
            ],
            "density_percent": [
                100 * masks[name].mean() if name in layouts else 100.0 for name in names
            ],
            "num_global": [masks[name].sum() if name in layouts else math.nan for name in names],
            "num_seeds": 1,
            "steps": [0.0 if name == DENSE else 40.0 for name in names],
        }
    )
    kinds = rng.random((len(compared),) * 2)
    errors = {
        frozenset((one, other)): math.nan
        if kinds[i, k] < 0.2
        else float(rng.choice([0.001, 0.05, 1.0]))
        for (i, one), (k, other) in combinations(enumerate(compared), 2)
    }
    if (kind := rng.random()) < 0.4:  # all are known to differ, or nothing is known
        errors = dict.fromkeys(errors, 0.0005) if kind < 0.25 else {}
    search = random_search(rng, masks) if rng.random() < 0.5 else None
    # The oracle: full retraining of several layouts in the search, or else the comparison
    mode = pd.Series([masks[name].sum() for name in compared]).mode().max()
    rows = comparison[
        comparison["strategy"].isin([name for name in compared if masks[name].sum() == mode])
    ]
    columns = ("delta_nll_percent", "delta_nll_standard_error")
    description = "retrained for 40 steps"
    baseline = names[0]
    if search is not None and search["full_delta_percent"].notna().sum() > 1:
        rows = search.dropna(subset="full_delta_percent").rename(columns={"name": "strategy"})
        columns, baseline, mode = ("full_delta_percent", "full_standard_error"), FULL_ATTENTION, 3
        description = "retrained for 120 steps, on held-out documents not used for selection"
    elif len(rows) < 2:
        # The longest retraining of several layouts may be the short one
        return random_case(seed + 1000)
    ordered = rows.sort_values(columns[0], kind="stable")
    ranked = [
        (str(row["strategy"]), float(row[columns[0]]), float(row[columns[1]]))
        for _, row in ordered.iterrows()
    ]
    return Case(
        table, layouts, comparison, search, errors, ranked, int(mode), description, baseline, masks
    )


def random_search(rng: np.random.Generator, masks: dict[str, np.ndarray]) -> pd.DataFrame:
    """Draw layouts of one budget, of which some were retrained."""
    chosen = [name for name in masks if masks[name].sum() == 3]
    heads = [
        " ".join("".join("G" if one else "L" for one in row) for row in masks[name])
        for name in chosen
    ]
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
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)

    def written(case: Case) -> str:
        inputs = ReportInputs(
            case.table,
            case.layouts,
            comparison=case.comparison,
            search=case.search,
            search_record={"steps": {"short": 30, "full": 120}, "window": 8},
            pair_error=case.pair_error,
        )
        layout = conclude(inputs).layout
        file = write_report(
            tmp_path, inputs, steps=[Step("Go on:", f"spkv-nas go-on {layout and layout.name}")]
        )
        return (
            file.read_text(encoding="utf-8")
            .replace("\N{NO-BREAK SPACE}", " ")
            .replace("\N{MINUS SIGN}", "-")
        )

    return written


def texts(html: str, pattern: str) -> list[str]:
    """Return the texts of the elements that match a pattern, without their tags."""
    return [
        unescape(re.sub("<[^>]*>", "", result)).strip()
        for result in re.findall(pattern, html, re.DOTALL)
    ]


@pytest.mark.parametrize("seed", slow_after(4, range(50)))
def test_every_claim_of_the_page_follows_from_its_tables(
    write: Callable[[Case], str], seed: int
) -> None:
    case = random_case(seed)
    html = write(case)
    body = html[: html.index('<script type="application/json"')]
    check_lead(case, texts(body, '<p class="lead">(.*?)</p>')[0])
    check_competition(case, texts(body, "<p>(.*?)</p>"))
    check_layout(case, html)
    check_tags(case, body)
    claims = re.findall("lowest NLL|measured lowest", re.sub("<[^>]*>", "", body))
    is_clear = all(case.standing(index) == "behind" for index in range(1, len(case.ranked)))
    # A sentence, and a tag if it is clear
    assert claims == (["lowest NLL"] * 2 if is_clear else ["measured lowest"])


def check_lead(case: Case, lead: str) -> None:
    """Check layout, budget, memory, measure, value and baseline of the headline."""
    sentence = re.fullmatch(LEAD, lead)
    assert sentence is not None, lead
    best, delta, error = case.ranked[0]
    assert (sentence["name"], int(sentence["budget"])) == (best, case.budget)
    assert (sentence["how"], sentence["baseline"]) == (case.description, BASELINES[case.baseline])
    assert (sentence["value"], sentence["error"]) == (f"{delta:+.3f}", f"{error:.3f}")
    kept = case.budget / 8 + (1 - case.budget / 8) * 8 / 131_072
    assert float(sentence["saved"]) == pytest.approx(100 * (1 - kept), abs=0.051)


def check_competition(case: Case, paragraphs: list[str]) -> None:
    """Check the number of layouts, and that all that are not clearly behind are named with their differences."""
    sentences = [
        match
        for text in paragraphs
        for pattern in COMPETITION
        if (match := re.fullmatch(pattern, text))
    ]
    close = [index for index in range(1, len(case.ranked)) if case.standing(index) != "behind"]
    (sentence,) = sentences
    assert int(sentence[1]) == len(case.ranked)
    assert ("close" in sentence.re.groupindex) == bool(close)
    if not close:
        return
    items = sentence["close"].split(", ")
    more = re.fullmatch(r"and (\d+) more", items[-1])
    assert len(items) - bool(more) + (int(more[1]) if more else 0) == len(close)
    for item, index in zip(items[: len(items) - bool(more)], close, strict=False):
        (best, lowest, _), (name, delta, _) = case.ranked[0], case.ranked[index]
        error = case.pair_error(best, name) if case.standing(index) == "tied" else math.nan
        assert (
            item == f"{name} {delta - lowest:+.3f} ± {'—' if math.isnan(error) else f'{error:.3f}'}"
        )


def check_layout(case: Case, html: str) -> None:
    """Check that link, top figures, the explorer's first layout, its file and the command are of the best layout."""
    name = case.names[0]
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
        zip(
            texts(html, r"<li><strong>(.*?)</strong>"),
            texts(html, r"</strong><span>(.*?)</span>"),
            strict=True,
        )
    )
    assert tiles[2] == (
        f"{100 * coverage(case.table, layout):.1f} %",
        f"density coverage of {name}",
    )
    assert texts(html, r'<code id="next-1">(.*?)</code>') == [f"spkv-nas go-on {name}"]


def check_tags(case: Case, body: str) -> None:
    """Check that the deciding table tags the best if it is clear, else all that are not clearly behind."""
    rows = re.findall(r'<th scope="row">([^<]*)<span class="tag">(.*?)</span>', body)
    close = {
        case.names[index]
        for index in range(1, len(case.ranked))
        if case.standing(index) != "behind"
    }
    best = (case.names[0], "not clearly behind" if close else "lowest NLL")
    assert sorted(rows) == sorted([best, *((name, "not clearly behind") for name in close)])


def test_errors_of_layouts_on_the_same_documents_are_paired() -> None:
    verdict = conclude(make_evidence())
    assert verdict.lead[1] == "density-0-1"
    assert len(verdict.close) == 1  # .3 and .7 points, with errors of .1 each


def test_before_training_the_page_is_of_the_widest_layout() -> None:
    verdict = conclude(ReportInputs(make_domain_table(), make_layouts("densest", "last")))
    assert "".join(verdict.lead) == (
        "densest: 2 of 8 KV heads global, 75.0 % less KV cache at 131,072 tokens; its loss has not been measured."
    )
    assert verdict.sentences[0].startswith(
        "It was proposed by density: its global heads have 47.1 % of the sum"
    )


def scored(heads: dict[str, str], change: dict[str, float], **record: Any) -> ResultFile:
    """Make a table of ``score`` in which layouts of window 8 have an error of .1."""
    rows = [
        (
            name,
            "h",
            text.count("G"),
            25.0,
            26.2,
            50.0,
            2.0,
            change[name],
            0.1,
            " ".join(text.split("/")),
        )
        for name, text in heads.items()
    ]
    content = {"num_documents": 60, "windows": dict.fromkeys(heads, 8)} | record
    return ResultFile(
        Path("reports/any/zero-shot.csv"),
        pd.DataFrame(rows, columns=SCORES.header[: -len(COLUMNS)]),
        content,
    )


def judged(answer: str, name: str, layout: Layout, **recorded: Any) -> ResultFile:
    """Make a verdict on a layout under any name."""
    row = (name, "nll", answer, 1.0, "%", 0.7, 0.2, 0.95, 80, None, 0.01, 1.0)
    layouts = {name: {"heads": " ".join(layout.heads), "window": layout.window, **recorded}}
    rows = pd.DataFrame([row], columns=VERDICT_TABLE.header[: -len(COLUMNS) - 1])
    record = {
        "answers": {name: answer},
        "layouts": layouts,
        "nouns": {"nll": "documents"},
        "risk": 0.05,
    }
    return ResultFile(Path("reports/model/verdict.csv"), rows, record)


def test_a_page_answers_what_is_saved_and_what_is_lost() -> None:
    """Beside a verdict that a layout passed, a page said that it is not known which has the lowest NLL."""
    layouts = make_layouts("densest", "last")
    heads = {name: "/".join(layout.heads) for name, layout in layouts.items()}
    scores = scored(heads, {"densest": 0.74, "last": 2.0})
    table = replace(make_domain_table(), record=ProbeRecord.of({"positions": 512}))
    inputs = ReportInputs(table, layouts, scores=(scores,))
    lead = (
        "densest: 2 of 8 KV heads global, 73.8 % less KV cache at 512 tokens; NLL +0.740 ± 0.100 % against the dense "
        "model as it is, not retrained, on 60 documents"
    )
    assert "".join(conclude(inputs).lead) == f"{lead}."
    passed = replace(inputs, verdicts=(judged("passes", "any-name", layouts["densest"]),))
    # A verdict is quoted from its own record alone, and the score of the layout in a sentence of its own
    answer = (
        "densest: 26.2 % of the KV cache at 512 tokens; nll +0.700 % (interval +0.200 to +0.950 %), on 80 documents; "
        "passes 1 % (nll) at a risk of 5 %."
    )
    assert "".join(conclude(passed).lead) == answer
    assert conclude(passed).sentences[1:] == (f"By scores: {lead.partition('; ')[2]}.",)
    for other in (
        judged("passes", "any-name", replace(layouts["densest"], window=4)),  # another layout
        judged("passes", "any-name", layouts["densest"], trained=True),  # other weights
    ):
        assert "".join(conclude(replace(inputs, verdicts=(other,))).lead) == f"{lead}."
    # The layout that passes comes before the one of the lowest NLL
    assert (
        conclude(replace(inputs, verdicts=(judged("passes", "x", layouts["last"]),))).lead[1]
        == "last"
    )
    assert "".join(conclude(replace(passed, scores=())).lead) == answer
    # One that does not pass leaves the lead to the scores
    failed = conclude(replace(inputs, verdicts=(judged("fails", "x", layouts["densest"]),)))
    assert "".join(failed.lead) == f"{lead}."
    assert (
        "By a verdict, nll +0.700 % (interval +0.200 to +0.950 %), on 80 documents; fails 1 % (nll)"
        in "".join(failed.sentences)
    )


def test_an_answer_that_stands_comes_before_earlier_ones() -> None:
    """The page of a second run with a smaller margin quoted the first, whose layout was smaller."""
    layouts = make_layouts("densest", "last")
    now = judged("passes", "densest", layouts["densest"])
    smaller = Layout(("GL", "LL", "LL", "LL"), 8, "small")
    earlier = replace(
        judged("passes", "small", smaller), path=Path("reports/model/verdict-0a1b2c3d.csv")
    )
    for verdicts in ((now, earlier), (earlier, now)):
        inputs = ReportInputs(make_domain_table(), layouts, verdicts=verdicts)
        assert conclude(inputs).lead[1] == "densest"
    assert (
        conclude(ReportInputs(make_domain_table(), layouts, verdicts=(earlier,))).lead[1] == "small"
    )


def test_scores_on_documents_that_selected_come_last_and_say_so() -> None:
    """A headline quoted the lower loss, on the documents by which the probe had selected the heads."""
    layouts = make_layouts("densest", "last")
    heads = {name: "/".join(layout.heads) for name, layout in layouts.items()}
    biased = scored(heads, {"densest": 0.5, "last": 2.0}, num_selection=60)
    fair = scored(heads, {"densest": 0.74, "last": 2.0}, num_selection=0)
    inputs = ReportInputs(make_domain_table(), layouts, scores=(biased, fair))
    assert "NLL +0.740 ± 0.100 %" in "".join(conclude(inputs).lead)
    alone = "".join(conclude(replace(inputs, scores=(biased,))).lead)
    assert re.search(
        r"\+0\.500 .*partly on documents that layouts were selected on, which may favour them",
        alone,
    )


def test_measured_layouts_stay_when_their_names_stand_for_others() -> None:
    """After proposing another budget, the page said that the layout nearest to a measured one was 8 heads apart."""
    current = {"densest": Layout(("GG", "GG", "LL", "LL"), 8, "densest")}
    scores = scored({"densest": "GL/LG/LL/LL"}, {"densest": 0.5})
    inputs = ReportInputs(make_domain_table(), current, scores=(scores,))
    (evidence,) = all_evidence(inputs)
    assert [result.name for result in evidence.results] == ["densest-2"]
    explorer = explorer_data(inputs, conclude(inputs))
    assert explorer is not None
    assert [name for name, _ in explorer["layouts"]] == ["densest", "densest-2"]
    assert conclude(inputs).lead[1] == "densest-2"


def test_the_dense_model_is_a_row_and_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes count from it, not from the control, which retraining may harm."""
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    comparison = pd.concat(
        [
            pd.DataFrame(
                {
                    "strategy": [DENSE],
                    "nll": [1.98],
                    "density_percent": 100.0,
                    "coverage_percent": 100.0,
                }
            ),
            make_comparison(delta_nll_percent=[1.0, 1.06, 1.2, 1.3, 1.5]),
        ]
    )
    file = write_report(
        tmp_path, ReportInputs(make_domain_table(), make_layouts("densest"), comparison=comparison)
    )
    html = file.read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    page = Page(html)
    assert (
        "NLL +1.200 ± 0.010 % against the dense model as it is"
        in texts(html, '<p class="lead">(.*?)</p>')[0]
    )
    heads = texts(html, r"<thead><tr>(<th scope=\"col\">Strategy.*?)</tr>")[0]
    assert heads.startswith("StrategyΔ NLL, %Δ NLL against control, %")
    rows = [text for text in page.texts["th"] if text.startswith(("dense,", "full-attention"))]
    assert rows == ["full-attention, the control", "dense, as it is"]
    for chart in ("coverage-nll", "cache-nll"):
        drawn = texts(html, rf'(<svg [^>]*data-chart="{chart}".*?</svg>)')[0]
        assert all(name in drawn for name in ("layout", "control", "dense model as it is"))


def test_nll_is_drawn_against_bytes_of_the_cache() -> None:
    table = make_domain_table(record=ProbeRecord.of({"head_dim": 16, "dtype": "bfloat16"}))
    inputs = ReportInputs(table, make_layouts("densest", "last"), comparison=make_comparison())
    chart = cache_nll_chart(inputs, conclude(inputs))
    assert chart is not None
    points = next(
        mark for mark in chart.marks if isinstance(mark, Points) and mark.label == "layout"
    )
    # Two of eight heads hold all tokens, the others their window
    mib = 2 * 16 * 2 * (2 * 131072 + 6 * 8) / 2**20
    assert points.x == pytest.approx([mib] * 3, rel=1e-4)
    assert points.y == (0.2, 0.3, 0.5)


def test_no_table_is_shown_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts of a search are in one table."""
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    case = make_evidence()
    file = write_report(
        tmp_path,
        ReportInputs(
            case.table, dict(case.layouts), comparison=case.comparison, search=case.search
        ),
    )
    page = Page(file.read_text(encoding="utf-8"))
    assert [table.get("id") for table in page.all("table")].count("measured-all") == 1
    assert "Measured layouts" not in page.texts["h2"]
    assert sum("density-0-1" in text for text in page.texts["th"]) == 1


def test_terms_are_explained_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page.plot, "save_chart", lambda *_: None)
    case = make_evidence()
    file = write_report(
        tmp_path,
        ReportInputs(
            case.table, dict(case.layouts), comparison=case.comparison, search=case.search
        ),
    )
    page = Page(file.read_text(encoding="utf-8"))
    meanings = {
        definition["id"]
        for definition in page.all("dd")
        if str(definition.get("id")).startswith("word-")
    }
    terms = {str(link["href"])[1:] for link in page.all("a") if link.get("class") == "term"}
    words = (
        "measure",
        "coverage",
        "tau",
        "budget",
        "window",
        "delta",
        "control",
        "dense",
        "layout",
    )
    assert terms == {f"word-{word}" for word in words}
    assert terms <= meanings
