"""Format the rows of the page's tables, and compress the tables that it offers for download."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from gzip import compress
from typing import Any

import pandas as pd

from spkv_nas.artifacts.comparison import DENSE, FULL_ATTENTION, SP_KV, counted_from
from spkv_nas.base.tables import csv_text
from spkv_nas.evaluation.searched import best_layouts
from spkv_nas.report.evidence import COMPARISON, SEARCH, all_evidence
from spkv_nas.report.formatting import change, number, without_folder
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.section import Row
from spkv_nas.report.verdict import Verdict

_MAX_MISSED = 5
_GROUPS = {SP_KV: 1, FULL_ATTENTION: 2, DENSE: 3}  # order of the rows, after the layouts (0)
_NAMES = {FULL_ATTENTION: "full-attention, the control", DENSE: "dense, as it is"}


def facts(inputs: ReportInputs, verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of the page, the verdict's last.

    Returns:
        (value, description, key in the glossary or "") of each.
    """
    table = inputs.table
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
    best = verdict.layout
    if best is not None and verdict.covered is not None:
        entries.append((f"{100 * verdict.covered:.1f} %", f"{measure.noun} coverage of {best.name}", "coverage"))
    return entries


def missed_rows(inputs: ReportInputs) -> list[tuple[str, ...]]:
    """Return the heads that ``densest`` leaves out although they save most: head, gain, value, rank."""
    if inputs.trust is None:
        return []
    values = inputs.table.values
    return [
        (
            f"layer {head.layer}, KV head {head.kv_head}",
            f"{number(1000 * head.gain, 1)} ± {number(1000 * head.standard_error, 1)}",
            inputs.table.measure.exact(values[head.layer, head.kv_head]),
            str(1 + int((values > values[head.layer, head.kv_head]).sum())),
        )
        for head in inputs.trust.missed[:_MAX_MISSED]
    ]


def comparison_header(inputs: ReportInputs) -> list[tuple[str, str]]:
    """Return (title, key in the glossary or "") of each column; changes of NLL first, for narrow screens."""
    control = [("Δ NLL against control, %", "control")] if _has_dense(inputs) else []
    return [
        ("Strategy", ""),
        ("Δ NLL, %", "delta"),
        *control,
        ("NLL", ""),
        ("Global KV heads", "budget"),
        ("Density, %", ""),
        ("Coverage, %", "coverage"),
        ("Seeds", ""),
        ("Steps", ""),
        *([] if inputs.comparison is None or (inputs.comparison["note"] == "").all() else [("Note", "")]),
    ]


def comparison_rows(inputs: ReportInputs, verdict: Verdict) -> list[list[Row]]:
    """Return the groups of rows: layouts, lowest NLL first, then each reference; nothing before training."""
    comparison = inputs.comparison
    if comparison is None:
        return []
    baseline, has_dense = counted_from(comparison), _has_dense(inputs)
    has_notes = (comparison["note"] != "").any()
    rows: list[list[Row]] = [[] for _ in range(1 + max(_GROUPS.values()))]
    for row in comparison.sort_values("nll", kind="stable").to_dict("records"):
        name = row["strategy"]
        references = (
            ("delta_nll", baseline),
            *([("delta_control", FULL_ATTENTION)] if has_dense else []),
        )
        # Changes of NLL, against the baseline and the control
        changes = (
            "reference" if name == reference else change(row[f"{column}_percent"], row[f"{column}_standard_error"])
            for column, reference in references
        )
        cells = (
            *changes,
            number(row["nll"], 4),
            number(row["num_global"], 0),
            number(row["density_percent"], 1),
            number(row["coverage_percent"], 2),
            number(row["num_seeds"], 0),
            number(row["steps"], 0),
        )
        # Label the row that the verdict is about
        tag = "" if name in _GROUPS else verdict.tag(name, COMPARISON, row["steps"])
        rows[_GROUPS.get(name, 0)].append(
            Row(_NAMES.get(name, name), (*cells, *([row["note"]] if has_notes else [])), tag)
        )
    return [group for group in rows if group]


def _has_dense(inputs: ReportInputs) -> bool:
    """Return True if the comparison has a row for the dense model as it is."""
    return inputs.comparison is not None and counted_from(inputs.comparison) == DENSE


def agreement_rows(rows: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return both probes, budget, Jaccard index, rank correlation and transfer of each pair."""
    return [
        (
            str(row["first"]),
            str(row["second"]),
            number(row["budget"], 0),
            number(row["jaccard"], 2),
            number(row["spearman"], 3),
            number(100 * row["transfer"], 1),
        )
        for _, row in rows.iterrows()
    ]


def search_about(inputs: ReportInputs) -> str:
    """Return what a search did, and on how many documents."""
    modes = [
        f"{len(each.results)} {each.description}{f' ({each.documents})' if each.documents else ''}"
        for each in reversed(all_evidence(inputs))
        if each.source == SEARCH
    ]
    return f"Distinct layouts of the search: {'; '.join(modes)}."


def search_header(inputs: ReportInputs) -> tuple[str, ...]:
    """Return the column titles of a search's table; changes of NLL come first."""
    steps = inputs.search_record.get("steps") or {}
    retrained = (
        f"Δ NLL, %, {kind} retraining" + (f" ({steps[kind]} steps)" if kind in steps else "")
        for kind in ("full", "short")
    )
    cost = ("Cost",) if _has_cost(inputs.search) else ()
    return ("Layout", *retrained, "Δ NLL, %, zero-shot", "Global KV heads", "Coverage, %", *cost)


def search_rows(rows: pd.DataFrame, verdict: Verdict | None = None) -> list[tuple[str, tuple[str, ...]]]:
    """Return the best layouts of a search as (tag, cells), with their cost if the search has one."""
    return [
        (
            "" if verdict is None else verdict.tag(str(row["name"]), SEARCH),
            (
                str(row["name"]),
                change(row["full_delta_percent"], row["full_standard_error"]),
                change(row["short_delta_percent"], row["short_standard_error"]),
                change(row["zero_shot_delta_percent"], row["zero_shot_standard_error"]),
                number(row["num_global"], 0),
                number(row["coverage_percent"], 1),
                *([f"{row['cost']:.4g}"] if _has_cost(rows) else []),
            ),
        )
        for row in best_layouts(rows).to_dict("records")
    ]


def _has_cost(rows: pd.DataFrame | None) -> bool:
    """Return True if every layout of a search has a cost."""
    return rows is not None and bool(rows["cost"].notna().all())


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


def downloads(inputs: ReportInputs) -> list[tuple[str, str]]:
    """Return (file name, data URI) of each table, gzipped and safe to open in a spreadsheet."""
    frames = {"density.csv": inputs.table.rows}
    if inputs.comparison is not None:
        frames["comparison.csv"] = inputs.comparison
    return [
        (
            f"{name}.gz",
            "data:application/gzip;base64," + b64encode(compress(safe_csv(frame).encode(), mtime=0)).decode(),
        )
        for name, frame in frames.items()
    ]


def safe_csv(frame: pd.DataFrame) -> str:
    """Return CSV without spreadsheet formulas: texts that start with ``= + - @`` get a leading apostrophe."""
    return csv_text(frame.rename(columns=_safe_cell).map(_safe_cell))


def _safe_cell(value: Any) -> Any:
    """Escape a text that a spreadsheet would run as a formula, also after white space; numbers stay numbers."""
    return f"'{value}" if isinstance(value, str) and value.lstrip().startswith(("=", "+", "-", "@")) else value


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
