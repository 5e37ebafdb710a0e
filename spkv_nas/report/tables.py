"""Format the page's tables, the sentences above them, its glossary, and the tables that it offers for download."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from spkv_nas.artifacts.comparison import DENSE, FULL_ATTENTION, SP_KV, counted_from
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.search_table import FIDELITIES
from spkv_nas.evaluation.ranking import MIN_ITEMS, best_layouts, correlations
from spkv_nas.report.chart import Row
from spkv_nas.report.evidence import COMPARISON, SEARCH, all_evidence
from spkv_nas.report.formatting import BASELINES, change, number, signed, without_folder
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.verdict import Verdict

_MAX_MISSED = 5
_GROUPS = {SP_KV: 1, FULL_ATTENTION: 2, DENSE: 3}  # order of the rows, after the layouts (0)
_COMPARED = {  # columns of the comparison beside changes of NLL: title -> column and digits
    "NLL": ("nll", 4),
    "Global KV heads": ("num_global", 0),
    "Density, %": ("density_percent", 1),
    "Coverage, %": ("coverage_percent", 2),
    "Seeds": ("num_seeds", 0),
    "Steps": ("steps", 0),
}
Table = tuple[tuple[str, ...], list[tuple[Row, ...]]]  # titles of the columns, and groups of rows
_NAMES = {FULL_ATTENTION: "full-attention, the control", DENSE: "dense, as it is"}


def facts(inputs: ReportInputs, verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of the page, the verdict's last.

    Returns:
        (value, description, key in the glossary or "") of each.
    """
    table = inputs.table
    # Describe the mean score in the unit of its signal
    measure, factor = table.measure, table.measure.scale.factor
    description, percent = f"mean {measure.noun}", " %"
    if table.is_density:
        description += f" at τ = {table.tau:g}"
    elif not measure.is_share:
        description, percent = f"{description}, {measure.shown}", ""
    entries = [
        (f"{factor * table.mean:.1f}{percent}", f"{description}, ± {factor * table.std:.1f} across heads", "measure"),
        (str(table.num_heads), f"KV heads: {table.num_layers} layers of {table.num_kv_heads}", ""),
    ]
    # Add the coverage of the verdict's layout
    best = verdict.layout
    if best is not None and verdict.covered is not None:
        entries.append((f"{100 * verdict.covered:.1f} %", f"{measure.noun} coverage of {best.name}", "coverage"))
    return entries


def score_rows(table: HeadScores) -> Table:
    """Return the value of every KV head, a row per layer, ± standard error where it is known."""
    exact = table.measure.exact
    cells = (
        (exact(value) + ("" if math.isnan(error) else f" ± {exact(error)}") for value, error in zip(*rows, strict=True))
        for rows in zip(table.values, table.standard_error, strict=True)
    )
    rows = tuple(Row(str(layer), tuple(row)) for layer, row in enumerate(cells))
    return ("Layer", *(f"KV head {head}" for head in range(table.num_kv_heads))), [rows]


def missed_rows(inputs: ReportInputs) -> Table | None:
    """Return the heads that ``densest`` leaves out although they save most; None without any."""
    if inputs.trust is None or not inputs.trust.missed:
        return None
    table = inputs.table
    rows = tuple(
        Row(
            f"layer {head.layer}, KV head {head.kv_head}",
            (
                f"{number(1000 * head.gain, 1)} ± {number(1000 * head.standard_error, 1)}",
                table.measure.exact(table.values[head.layer, head.kv_head]),
                str(1 + int((table.values > table.values[head.layer, head.kv_head]).sum())),
            ),
        )
        for head in inputs.trust.missed[:_MAX_MISSED]
    )
    return ("Excluded head", "Gain, nats / 1,000", table.measure.title, f"Rank of {table.num_heads}"), [rows]


def comparison_rows(inputs: ReportInputs, verdict: Verdict) -> Table | None:
    """Return layouts, lowest NLL first, then each reference, as groups; None before training.

    Changes of NLL are the first columns, for narrow screens.
    """
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
    groups: list[list[Row]] = [[] for _ in range(1 + max(_GROUPS.values()))]
    for row in comparison.sort_values("nll", kind="stable").to_dict("records"):
        name = row["strategy"]
        cells = (
            *(
                "reference" if name == reference else change(row[f"{column}_percent"], row[f"{column}_standard_error"])
                for column, reference in references.values()
            ),
            *(number(row[column], digits) for column, digits in _COMPARED.values()),
            *(row["note"] for _ in notes),
        )
        tag = "" if name in _GROUPS else verdict.tag(name, COMPARISON, row["steps"])
        groups[_GROUPS.get(name, 0)].append(Row(_NAMES.get(name, name), cells, tag))
    return ("Strategy", *references, *_COMPARED, *notes), [tuple(group) for group in groups if group]


def agreement_rows(rows: pd.DataFrame | None) -> Table | None:
    """Return both probes, budget, Jaccard index, rank correlation and transfer of each pair; None without any."""
    if rows is None:
        return None
    columns = {
        "Budget": ("budget", 0, 1),
        "Jaccard": ("jaccard", 2, 1),
        "Spearman": ("spearman", 3, 1),
        "Transfer, %": ("transfer", 1, 100),
    }
    lines = tuple(
        Row(
            str(row["first"]),
            (str(row["second"]), *(number(f * row[column], digits) for column, digits, f in columns.values())),
        )
        for row in rows.to_dict("records")
    )
    return ("Probe", "Other probe", *columns), [lines]


def search_about(inputs: ReportInputs) -> str:
    """Return what a search did, and on how many documents."""
    modes = [
        f"{len(each.results)} {each.description}{f' ({each.documents})' if each.documents else ''}"
        for each in reversed(all_evidence(inputs))
        if each.source == SEARCH
    ]
    return f"Distinct layouts of the search: {'; '.join(modes)}."


def search_rows(inputs: ReportInputs, verdict: Verdict | None = None) -> Table | None:
    """Return the best layouts of a search, with their cost if the search has one; None without a search."""
    if inputs.search is None:
        return None
    # Name the columns by the steps of retraining
    steps = inputs.search_record.get("steps") or {}
    has_cost = bool(inputs.search["cost"].notna().all())
    retrained = (
        f"Δ NLL, %, {kind} retraining" + (f" ({steps[kind]} steps)" if kind in steps else "")
        for kind in ("full", "short")
    )
    header = ("Layout", *retrained, "Δ NLL, %, zero-shot", "Global KV heads", "Coverage, %", *["Cost"][: int(has_cost)])
    rows = tuple(
        Row(
            str(row["name"]),
            (
                *(change(row[f"{kind}_delta_percent"], row[f"{kind}_standard_error"]) for kind in reversed(FIDELITIES)),
                number(row["num_global"], 0),
                number(row["coverage_percent"], 1),
                *([f"{row['cost']:.4g}"] if has_cost else []),
            ),
            "" if verdict is None else verdict.tag(str(row["name"]), SEARCH),
        )
        for row in best_layouts(inputs.search).to_dict("records")
    )
    return header, [rows]


def provenance(inputs: ReportInputs) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (heading, (key, value) pairs) for the probe, the comparison and every layout."""
    table = inputs.table
    probe = {"name": table.name, "tau": table.tau, "window": table.window, **table.metadata}
    sections = [("Probe", list(_flatten(probe))), ("Comparison", list(_flatten(inputs.record)))]
    for name, layout in inputs.layouts.items():
        seen = {"window": layout.window, **({"sinks": layout.sinks} if layout.sinks else {})}
        content = {"content hash": layout.content_hash, **seen, **layout.provenance}
        sections.append((f"Layout {name}", list(_flatten(content))))
    return [(heading, pairs) for heading, pairs in sections if pairs]


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested mappings as (dotted key, text); lists of plain values are one line."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from _flatten(item, f"{key}.{i}")
    elif isinstance(value, list | tuple):
        yield key, ", ".join(without_folder(str(item)) for item in value)
    else:
        yield key, "—" if value is None else without_folder(str(value))


def findings(record: Mapping[str, Any]) -> list[str]:
    """Return the rank correlations that ``comparison.yaml`` records, in a sentence.

    Their keys are rho and, where known, layouts and interval.
    """
    recorded, zero_shot = record.get("rank_correlation"), record.get("zero_shot_rank_correlation")
    if recorded is None:
        return []
    over = f" over {recorded['layouts']} layouts" if "layouts" in recorded else ""
    sentence = f"Spearman's rank correlation of coverage and NLL increase{over} is {_with_uncertainty(recorded)}"
    if zero_shot is not None:
        sentence += f", that of the NLL increase before any training {_with_uncertainty(zero_shot)}"
        return [f"{sentence}; {signed(-1, 0)} and {signed(1, 0)} would be perfect rankings."]
    return [f"{sentence}; {signed(-1, 0)} would be a perfect ranking."]


def _with_uncertainty(recorded: Mapping[str, Any]) -> str:
    """Return a rank correlation with its interval or, below ``MIN_ITEMS`` layouts, its p-value, if recorded."""
    text, interval, p_value = signed(recorded["rho"], 2), recorded.get("interval"), recorded.get("p_value")
    if recorded.get("layouts", MIN_ITEMS) < MIN_ITEMS or interval is None:
        return text if p_value is None else f"{text} (p {f'= {p_value:.2g}' if p_value else '< 0.0001'})"
    low, high = (signed(bound, 2) for bound in interval)
    return f"{text} (95 % interval {low} to {high})"


def search_findings(inputs: ReportInputs) -> list[str]:
    """Return how well cheap scores rank the layouts of a search.

    Nothing where the retrained layouts were measured on too few documents to rank them.
    """
    rows = inputs.search
    if rows is None or not all(each.is_rankable for each in all_evidence(inputs) if each.fidelity == "full"):
        return []
    return [
        f"Rank correlation of {pair} over {correlation['layouts']} layouts: {_with_uncertainty(correlation)}."
        for pair, correlation in correlations(rows).items()
        if correlation is not None
    ]


def glossary(inputs: ReportInputs) -> dict[str, tuple[str, str]]:
    """Return (title, meaning) of each term that the page uses, by key."""
    table, measure = inputs.table, inputs.table.measure
    clipping = "" if table.is_density else " (0 where it is negative)"
    sinks = f"the first {table.sinks} token{'s' if table.sinks > 1 else ''} of a sequence (sink tokens) and "
    local_keys = (sinks if table.sinks else "") + "its window"
    # Terms of every page
    terms = {
        "measure": (measure.title, measure.meaning),
        "window": (
            "Window",
            "Number of most recent keys that a local KV head sees, the query's own included"
            + (f"; here {table.window}." if table.window else "."),
        ),
        "layout": ("Layout", f"For each KV head: global (sees all earlier keys), or local (sees {local_keys} only)."),
        "budget": ("Budget", "Number of global KV heads of a layout."),
        "coverage": (
            f"{measure.title} coverage",
            f"Sum of {measure.noun}{clipping} over the global heads of a layout, as a share of the sum over all heads.",
        ),
    }
    # Terms of gates
    if table.is_density:
        interpolated = (
            " At thresholds other than the probe's, densities are interpolated from its histogram of utilities, as by "
            "propose --tau."
        )
        meaning = "A key is kept if its utility, which the gate predicts, is at least τ."
        terms["tau"] = "Threshold τ", meaning + (interpolated if table.histogram else "")
    # Terms of results
    comparison = inputs.comparison
    if comparison is None and inputs.search is None:
        return terms
    baseline = "the dense model as it is where nothing was retrained, else the control"
    if comparison is not None:
        baseline = BASELINES[counted_from(comparison)]
        if inputs.search is not None and counted_from(comparison) == DENSE:
            baseline += "; in the search, of retrained layouts, the control"
    return terms | {
        "control": (
            "Control",
            "Full attention, retrained like the layouts: a difference from it is due to the layout, not to the "
            "retraining.",
        ),
        "dense": ("Dense model as it is", "The checkpoint before any retraining."),
        "delta": (
            "Δ NLL",
            f"Change of the negative log-likelihood per token on held-out text against {baseline}, in percent; lower "
            "is better. ± is one standard error over documents.",
        ),
    }
