"""Format the page's tables, the sentences above them, its glossary, and the tables that it offers for download."""

import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import pandas as pd

from spkv_nas.artifacts import grid, head_scores
from spkv_nas.artifacts.comparison import DENSE, FULL_ATTENTION, SP_KV, counted_from
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import FIDELITIES
from spkv_nas.evaluation.ranking import MIN_ITEMS, best_layouts, correlations
from spkv_nas.report import chart, evidence
from spkv_nas.report.formatting import change, number, signed, without_folder
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.verdict import Verdict

_GROUPS = {SP_KV: 1, FULL_ATTENTION: 2, DENSE: 3}  # order of the rows, after the layouts (0)
# Columns of the comparison beside changes of NLL: title -> column and digits
_COMPARED = {
    "NLL": ("nll", 4),
    "Global KV heads": ("num_global", 0),
    "Density, %": ("density_percent", 1),
    "Coverage, %": ("coverage_percent", 2),
    "Seeds": ("num_seeds", 0),
    "Steps": ("steps", 0),
}
# Titles of the columns, and groups of rows
Table = tuple[tuple[str, ...], list[tuple[chart.Row, ...]]]
_NAMES = {FULL_ATTENTION: "full-attention, the control", DENSE: "dense, as it is"}
# Titles and meanings of terms of pages with results
_RESULT_TERMS = {
    "control": (
        "Control",
        (
            "Full attention, retrained like the layouts: "
            "what differs from it is due to the layout, not to retraining."
        ),
    ),
    "dense": ("Dense model as it is", "The checkpoint before any retraining."),
    "delta": (
        "Δ NLL",
        (
            "Change of the negative log-likelihood per token on held-out text, in percent, "
            "against the dense model as it is or the control, as said beside it; lower is better. "
            "± is one standard error over documents."
        ),
    ),
}


def key_numbers(inputs: ReportInputs, verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return (value, description, glossary key or "") of the numbers at the top of the page, the verdict's last."""
    table = inputs.table
    # Describe the mean score in the unit of its signal
    measure = table.measure
    factor = measure.scale.factor
    description = f"mean {measure.noun}"
    percent = " %"
    if table.is_density:
        description += f" at τ = {table.tau:g}"
    elif not measure.is_share:
        description += f", {measure.shown}"
        percent = ""
    mean = f"{factor * table.mean:.1f}{percent}"
    spread = f"{description}, ± {factor * table.std:.1f} across heads"
    words = grid.grid_words(table.heads_per_layer).removesuffix(" KV heads").replace(" x ", " of ")
    entries = [
        (mean, spread, "measure"),
        (str(table.num_heads), f"KV heads: {words}", ""),
    ]
    # Add the coverage of the verdict's layout
    best = verdict.layout
    if best is not None and verdict.covered is not None:
        share = f"{100 * verdict.covered:.1f} %"
        entries.append((share, f"{measure.noun} coverage of {best.name}", "coverage"))
    return entries


def score_rows(table: head_scores.HeadScores) -> Table:
    """Return the value of every KV head, a row per layer, ± standard error where it is known."""
    rows = []
    for layer, (values, errors) in enumerate(zip(table.values, table.standard_error, strict=True)):
        cells = [
            _score_cell(table, value, error) for value, error in zip(values, errors, strict=True)
        ]
        rows.append(chart.Row(str(layer), tuple(cells)))
    header = ("Layer", *(f"KV head {head}" for head in range(table.num_kv_heads)))
    return header, [tuple(rows)]


def _score_cell(table: head_scores.HeadScores, value: float, error: float) -> str:
    """Format a head's value ± its standard error; "" where there is no head."""
    if math.isnan(value):
        return ""
    text = table.measure.exact(value)
    return text if math.isnan(error) else f"{text} ± {table.measure.exact(error)}"


def comparison_rows(inputs: ReportInputs, verdict: Verdict) -> Table | None:
    """Return layouts, lowest NLL first, then each reference, as groups; None before training."""
    comparison = inputs.comparison
    if comparison is None:
        return None
    baseline = counted_from(comparison)
    # Compare with one reference, or with two
    references = {"Δ NLL, %": ("delta_nll", baseline)}
    if baseline == DENSE:
        references["Δ NLL against control, %"] = ("delta_control", FULL_ATTENTION)
    notes = ("Note",) if (comparison["note"] != "").any() else ()
    # Group the rows: layouts first, then the references
    groups: list[list[chart.Row]] = [[] for _ in range(1 + max(_GROUPS.values()))]
    for row in comparison.sort_values("nll", kind="stable").to_dict("records"):
        name = row["strategy"]
        cells = [_delta_cell(row, column, reference) for column, reference in references.values()]
        cells += [number(row[column], digits) for column, digits in _COMPARED.values()]
        if notes:
            cells.append(row["note"])
        tag = "" if name in _GROUPS else verdict.tag(name, evidence.COMPARISON, row["steps"])
        groups[_GROUPS.get(name, 0)].append(chart.Row(_NAMES.get(name, name), tuple(cells), tag))
    header = ("Strategy", *references, *_COMPARED, *notes)
    return header, [tuple(group) for group in groups if group]


def _delta_cell(row: Mapping[Hashable, Any], column: str, reference: str) -> str:
    """Format the change of NLL of a row against a reference, which may be the row itself."""
    if row["strategy"] == reference:
        return "reference"
    return change(row[f"{column}_percent"], row[f"{column}_standard_error"])


def probe_pair_rows(rows: pd.DataFrame | None) -> Table | None:
    """Return both probes, budget, Jaccard index, rank correlation and transfer of each pair; None without any."""
    if rows is None:
        return None
    lines = []
    for row in rows.to_dict("records"):
        cells = (
            str(row["second"]),
            number(row["budget"], 0),
            number(row["jaccard"], 2),
            number(row["spearman"], 3),
            number(100 * row["transfer"], 1),
        )
        lines.append(chart.Row(str(row["first"]), cells))
    header = ("Probe", "Other probe", "Budget", "Jaccard", "Spearman", "Transfer, %")
    return header, [tuple(lines)]


def search_about(inputs: ReportInputs) -> str:
    """Return what a search did, and on how many documents."""
    modes = []
    for mode in reversed(evidence.all_evidence(inputs)):
        if mode.source == evidence.SEARCH:
            documents = f" ({mode.documents})" if mode.documents else ""
            modes.append(f"{len(mode.results)} {mode.description}{documents}")
    return f"Distinct layouts of the search: {'; '.join(modes)}."


def search_rows(inputs: ReportInputs, verdict: Verdict | None = None) -> Table | None:
    """Return the best layouts of a search, with their cost if the search has one; None without a search."""
    if inputs.search is None:
        return None
    # Name the columns by the steps of retraining
    steps = inputs.search_record.get("steps") or {}
    has_cost = bool(inputs.search["cost"].notna().all())
    header = ["Layout"]
    for kind in ("full", "short"):
        number_of_steps = f" ({steps[kind]} steps)" if kind in steps else ""
        header.append(f"Δ NLL, %, {kind} retraining{number_of_steps}")
    header += ["Δ NLL, %, zero-shot", "Global KV heads", "Coverage, %"]
    if has_cost:
        header.append("Cost")
    # Format the rows
    rows = []
    for row in best_layouts(inputs.search).to_dict("records"):
        name = str(row["name"])
        cells = [
            change(row[f"{kind}_delta_percent"], row[f"{kind}_standard_error"])
            for kind in reversed(FIDELITIES)
        ]
        cells += [number(row["num_global"], 0), number(row["coverage_percent"], 1)]
        if has_cost:
            cells.append(f"{row['cost']:.4g}")
        tag = "" if verdict is None else verdict.tag(name, evidence.SEARCH)
        rows.append(chart.Row(name, tuple(cells), tag))
    return tuple(header), [tuple(rows)]


def provenance(inputs: ReportInputs) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (heading, (key, value) pairs) for the probe, the comparison and every layout."""
    table = inputs.table
    probe = {"name": table.name, "tau": table.tau, "window": table.window}
    probe |= table.record.entries()
    sections = [("Probe", list(_flatten(probe))), ("Comparison", list(_flatten(inputs.record)))]
    for name, layout in inputs.layouts.items():
        content: dict[str, Any] = {
            "content hash": layout.content_hash,
            "window": layout.windows or layout.window,
        }
        if layout.sinks:
            content["sinks"] = layout.sinks
        content |= layout.provenance
        sections.append((f"Layout {name}", list(_flatten(content))))
    return [(heading, pairs) for heading, pairs in sections if pairs]


def _flatten(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested mappings as (dotted key, text); lists of plain values are one line."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(inner, f"{key}.{name}" if key else str(name))
        return
    if isinstance(value, list | tuple):
        if any(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                yield from _flatten(item, f"{key}.{index}")
            return
        text = ", ".join(without_folder(str(item)) for item in value)
    else:
        text = "—" if value is None else without_folder(str(value))
    yield key, text


def findings(record: Mapping[str, Any]) -> list[str]:
    """Return the rank correlations that ``comparison.yaml`` records, in a sentence."""
    recorded = record.get("rank_correlation")
    if recorded is None:
        return []
    over = f" over {recorded['layouts']} layouts" if "layouts" in recorded else ""
    correlation = _with_uncertainty(recorded)
    sentence = f"Spearman's rank correlation of coverage and NLL increase{over} is {correlation}"
    zero_shot = record.get("zero_shot_rank_correlation")
    if zero_shot is None:
        return [f"{sentence}; {signed(-1, 0)} would be a perfect ranking."]
    correlation = _with_uncertainty(zero_shot)
    sentence += f", that of the NLL increase before any training {correlation}"
    return [f"{sentence}; {signed(-1, 0)} and {signed(1, 0)} would be perfect rankings."]


def _with_uncertainty(recorded: Mapping[str, Any]) -> str:
    """Return a rank correlation with its interval or, below ``MIN_ITEMS`` layouts, its p-value, if recorded."""
    text = signed(recorded["rho"], 2)
    interval = recorded.get("interval")
    is_small = recorded.get("layouts", MIN_ITEMS) < MIN_ITEMS
    if interval is not None and not is_small:
        low, high = (signed(bound, 2) for bound in interval)
        return f"{text} (95 % interval {low} to {high})"
    p_value = recorded.get("p_value")
    if p_value is None:
        return text
    return f"{text} (p = {p_value:.2g})" if p_value else f"{text} (p < 0.0001)"


def search_findings(inputs: ReportInputs) -> list[str]:
    """Return how well cheap scores rank the layouts of a search; nothing on too few documents."""
    rows = inputs.search
    if rows is None:
        return []
    retrained = [mode for mode in evidence.all_evidence(inputs) if mode.fidelity == "full"]
    if not all(mode.is_rankable for mode in retrained):
        return []
    return [
        f"Rank correlation of {pair} over {correlation['layouts']} layouts: "
        f"{_with_uncertainty(correlation)}."
        for pair, correlation in correlations(rows).items()
        if correlation is not None
    ]


def _letters(inputs: ReportInputs, chosen: Layout | None) -> str:
    """Return the windows of the letters of the chosen layout, else of the first of several windows; "" for none."""
    layout = chosen
    if layout is None:
        layout = next((shown for shown in inputs.layouts.values() if shown.windows), None)
    if layout is None:
        return ""
    return ", ".join(f"{letter} {window}" for letter, window in layout.legend.items())


def _windows_here(table: head_scores.HeadScores, chosen: Layout | None) -> str:
    """Return the windows of a layout, or else of a table, as they end a sentence; "" where none is known."""
    if chosen is not None:
        return f"; here {' or '.join(str(width) for width in chosen.legend.values())}"
    return f"; here {table.window}" if table.window else ""


def glossary(
    inputs: ReportInputs, verdict: Verdict, chosen: Layout | None = None
) -> dict[str, tuple[str, str]]:
    """Return (title, meaning) of each term that the page uses, by key; windows are those of the headline's layout."""
    table = inputs.table
    measure = table.measure
    clipping = "" if table.is_density else " (0 where it is negative)"
    sinks = ""
    if table.sinks:
        sinks = f"the first tokens of a sequence (sink tokens: {table.sinks}) and "
    # What the terms stand for on this page
    window = _windows_here(table, chosen)
    listed = _letters(inputs, chosen)
    letters = f"; here {listed}" if listed else ""
    # Terms of every page
    terms = {
        "measure": (measure.title, measure.meaning),
        "window": (
            "Window",
            (
                "Number of most recent keys that a local KV head sees, "
                f"the query's own included{window}."
            ),
        ),
        "layout": (
            "Layout",
            (
                "For each KV head: global (sees all earlier keys), "
                f"or local (sees {sinks}its window only)."
            ),
        ),
        "letters": (
            "Letters of a layout",
            (
                "G is a global head; L, M, N and so on are local heads by their windows, "
                f"the narrowest first{letters}."
            ),
        ),
        "budget": ("Budget", "Number of global KV heads of a layout."),
        "coverage": (
            f"{measure.title} coverage",
            (
                f"Sum of {measure.noun}{clipping} over the global heads of a layout, "
                "as a share of the sum over all heads."
            ),
        ),
    }
    # Terms of gates
    if table.is_density:
        meaning = "A key is kept if its utility, which the gate predicts, is at least τ."
        if table.histogram:
            meaning += (
                " At thresholds other than the probe's, densities are interpolated from its "
                "histogram."
            )
        terms["tau"] = ("Threshold τ", meaning)
    if inputs.comparison is not None or inputs.search is not None:
        terms |= _RESULT_TERMS
    return terms
