"""The rows of the page's tables, formatted, and the tables that it offers to download."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from gzip import compress
from typing import Any

import pandas as pd

from spkv_nas.artifacts.comparison import FULL_ATTENTION
from spkv_nas.artifacts.density import DensityTable
from spkv_nas.base.tables import csv_text
from spkv_nas.evaluation.guidance import best_layouts
from spkv_nas.report.headline import best_evidence
from spkv_nas.report.inputs import Inputs, contenders, is_layout, widest_layout
from spkv_nas.report.profiles import domain_profile
from spkv_nas.report.words import change, number, signed

_MOST_MISSED = 5


@dataclass(frozen=True)
class ComparisonRow:
    """One line of the comparison table, formatted. ``group``: 0 layouts, 1 SP-KV, 2 full attention (as the paper)."""

    group: int
    strategy: str
    best: bool
    cells: tuple[str, ...]
    note: str


def facts(inputs: Inputs) -> list[tuple[str, str]]:
    """The four numbers at the top: (value, what it is)."""
    table = inputs.table
    measure, factor = table.measure, table.measure.scale.factor
    what, percent = f"mean {measure.noun}", " %"
    if table.is_density:
        what += f" at τ = {table.tau:g}"
    elif not measure.is_share:
        what, percent = f"{what}, {measure.shown}", ""
    shown = [
        (f"{factor * table.mean:.1f}{percent}", f"{what}, ± {factor * table.std:.1f} across heads"),
        (str(table.num_heads), f"KV heads: {table.num_layers} layers of {table.num_kv_heads}"),
    ]
    if (best := widest_layout(inputs)) is not None:
        shown.append((f"{100 * inputs.covered[best]:.1f} %", f"highest {measure.noun} coverage: {best}"))
    if (evidence := best_evidence(inputs)) is not None:
        winner = evidence.of_one_budget[0]
        shown.append((f"{signed(winner.delta)} %", f"NLL against full attention: {winner.name}"))
    return shown


def missed_rows(inputs: Inputs) -> list[tuple[str, ...]]:
    """The heads that the layout ``densest`` leaves out and that save most, alone: head, gain, value, its rank."""
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
        for head in inputs.trust.missed[:_MOST_MISSED]
    ]


def comparison_rows(inputs: Inputs) -> list[ComparisonRow]:
    """Layouts first, then the two references; none before training."""
    comparison = inputs.comparison
    if comparison is None:
        return []
    groups = is_layout(comparison).map({True: 0, False: 1}) + (comparison["strategy"] == FULL_ATTENTION).astype(int)
    best = contenders(comparison).index[:1]  # none where no layout has been trained
    rows = []
    for index, row in comparison.iterrows():
        delta = change(row["delta_nll_percent"], row["delta_nll_standard_error"])
        group = int(groups[index])
        cells = (
            number(row["num_global"], 0),
            number(row["density_percent"], 1),
            number(row["coverage_percent"], 2),
            number(row["nll"], 4),
            "reference" if row["strategy"] == FULL_ATTENTION else delta,
            number(row["num_seeds"], 0),
            number(row["steps"], 0),
        )
        rows.append(ComparisonRow(group, row["strategy"], index in best, cells, row["note"]))
    return sorted(rows, key=lambda row: row.group)


def domain_rows(table: DensityTable) -> list[tuple[str, ...]]:
    """Domain, tokens, documents, mean, spread and agreement of each domain."""
    return [
        (
            str(row["domain"]),
            number(row["num_tokens"], 0),
            number(row["num_documents"], 0) if row["num_documents"] else "—",
            table.measure.exact(row["mean"]),
            table.measure.exact(row["std"]),
            number(row["agreement"], 2),
        )
        for _, row in domain_profile(table).iterrows()
    ]


def agreement_rows(rows: pd.DataFrame) -> list[tuple[str, ...]]:
    """Both probes, budget, Jaccard index, rank correlation and transfer of each pair."""
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


def search_rows(rows: pd.DataFrame) -> list[tuple[str, ...]]:
    """The best layouts of a search; with the cost, where there is one."""
    return [
        (
            str(row["name"]),
            number(row["num_global"], 0),
            number(row["coverage_percent"], 1),
            *([f"{row['cost']:.4g}"] if not math.isnan(row["cost"]) else []),
            change(row["zero_shot_delta_percent"], row["zero_shot_standard_error"]),
            change(row["short_delta_percent"], row["short_standard_error"]),
            change(row["full_delta_percent"], row["full_standard_error"]),
        )
        for row in best_layouts(rows).to_dict("records")
    ]


def provenance(inputs: Inputs) -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, (key, value) pairs): of the probe, of the comparison, and of every layout."""
    table = inputs.table
    probe = {"name": table.name, "tau": table.tau, "window": table.window, **table.metadata}
    sections = [("Probe", list(_flatten(probe))), ("Comparison", list(_flatten(inputs.record)))]
    for name, layout in inputs.layouts.items():
        content = {"content hash": layout.content_hash, "window": layout.window, **layout.provenance}
        sections.append((f"Layout {name}", list(_flatten(content))))
    return [(heading, pairs) for heading, pairs in sections if pairs]


def downloads(inputs: Inputs) -> list[tuple[str, str]]:
    """(file name, data URI) of the tables, compressed, safe to open in a spreadsheet."""
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
    """CSV whose texts cannot act as formulas: one that starts with ``= + - @`` gets a leading apostrophe."""
    return csv_text(frame.rename(columns=_safe_cell).map(_safe_cell))


def _safe_cell(value: Any) -> Any:
    """Numbers stay numbers; leading white space does not hide a formula."""
    return f"'{value}" if isinstance(value, str) and value.lstrip().startswith(("=", "+", "-", "@")) else value


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings as dotted keys; lists of plain values on one line."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from _flatten(item, f"{key}.{i}")
    elif isinstance(value, list | tuple):
        yield key, ", ".join(map(str, value))
    else:
        yield key, "—" if value is None else str(value)
