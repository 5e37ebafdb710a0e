"""The report's page: one HTML file that loads nothing, and its figures beside it.

Names of strategies, domains and probes come from users, so everything is escaped by the template engine, scripts and
styles are allowed by their hash alone (Content-Security-Policy), and the script writes text only.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from spkv_nas.artifacts.comparison import FULL_ATTENTION
from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.files import write_atomic
from spkv_nas.base.version import __version__
from spkv_nas.proposal.stability import caution
from spkv_nas.report import charts
from spkv_nas.report.figures import write_figures
from spkv_nas.report.search_charts import certainty_map
from spkv_nas.report.search_figures import write_stability_figure
from spkv_nas.report.study_charts import study_charts, study_rows, study_sentences
from spkv_nas.report.study_figures import NAMES as STUDY_FIGURES
from spkv_nas.report.summary import (
    Inputs,
    contenders,
    domain_profile,
    findings,
    is_layout,
    number,
    signed,
    widest_layout,
)


def write_report(
    folder: Path,
    *,
    table: DensityTable,
    layouts: Mapping[str, Layout],
    comparison: pd.DataFrame | None = None,
    summary: Mapping[str, Any] | None = None,
    agreement: pd.DataFrame | None = None,
    study: pd.DataFrame | None = None,
) -> Path:
    """Write ``index.html`` and the figures (PNG and SVG) into ``folder``; returns the path of the page.

    Args:
        folder: made if it is not there; files of the same names are replaced, each atomically.
        table: density of the reference model.
        layouts: by name; the names are those in the comparison's column ``strategy``.
        comparison: one row per trained model, ``full-attention`` and ``sp-kv`` among them; columns strategy and, each
            optional or with gaps, density_percent, coverage_percent, nll (nats per token), delta_nll_percent,
            delta_nll_standard_error (in percentage points), num_global, num_seeds, steps, note. None before training.
        summary: what ``comparison.yaml`` says about the comparison as a whole; shown as it is.
        agreement: of ``spkv_nas.proposal.agreement``; None where no probes have been compared.
        study: of ``spkv_nas.evaluation.guidance``; None where no layouts have been searched for.

    Raises:
        UserError: a layout of another shape than the table, an unreadable number in the comparison, or a folder that
            cannot be written.
    """
    inputs = Inputs.check(table, layouts, comparison, summary)
    figures = write_figures(folder, inputs)
    if (sure := inputs.certainty) is not None:
        title = f"Chance to be one of the {sure.budget} densest heads, %"
        figures.append(write_stability_figure(folder, sure.probability["densest"], title))
    page = folder / "index.html"
    figures += [name for name in STUDY_FIGURES if study is not None and (folder / f"{name}.png").is_file()]
    write_atomic(page, _render(inputs, figures, agreement, study))
    return page


@dataclass(frozen=True)
class _Row:
    """One line of the comparison table, formatted. ``group``: 0 layouts, 1 SP-KV, 2 full attention (as the paper)."""

    group: int
    strategy: str
    best: bool
    cells: tuple[str, ...]
    note: str


def _render(inputs: Inputs, figures: list[str], agreement: pd.DataFrame | None, study: pd.DataFrame | None) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(px=_px, csp_hash=_csp_hash, tie=_tie)
    table = inputs.table
    nll = None if inputs.comparison is None else charts.nll_chart(inputs.comparison)
    page: str = environment.get_template("template.html.j2").render(
        version=__version__,
        table=table,
        findings=findings(inputs),
        diagnosis=table.diagnosis(),
        facts=_facts(inputs),
        heatmap=charts.heatmap(table),
        scale=charts.scale_stops(),
        layouts=list(_layouts(inputs)),
        rows=_comparison_rows(inputs),
        result_charts=[chart for chart in (nll, charts.budget_chart(inputs)) if chart],
        density_charts=[
            chart
            for chart in (charts.domain_chart(table), charts.position_chart(table), charts.histogram_chart(table))
            if chart
        ],
        domains=_domains(table),
        certainty=inputs.certainty,
        certainty_map=None if inputs.certainty is None else certainty_map(inputs.certainty),
        caution=caution(table),
        agreement=_agreement(agreement),
        study=None if study is None else study_rows(study),
        study_has_cost=study is not None and bool(study["cost"].notna().all()),
        study_charts=[] if study is None else study_charts(study),
        study_sentences=[] if study is None else study_sentences(study),
        provenance=_provenance(inputs),
        downloads=_downloads(inputs),
        figures=figures,
    )
    return page


def _facts(inputs: Inputs) -> list[tuple[str, str]]:
    """The four numbers at the top: (value, what it is)."""
    table = inputs.table
    facts = [
        (f"{100 * table.mean:.1f} %", f"mean density at τ = {table.tau:g}, ± {100 * table.std:.1f} across heads"),
        (str(table.num_heads), f"KV heads: {table.num_layers} layers of {table.num_kv_heads}"),
    ]
    if (best := widest_layout(inputs)) is not None:
        facts.append((f"{100 * inputs.coverage[best]:.1f} %", f"highest density coverage: {best}"))
    if inputs.comparison is not None and not (trained := contenders(inputs.comparison)).empty:
        winner = trained.iloc[0]
        if not math.isnan(winner["delta_nll_percent"]):
            facts.append(
                (f"{signed(winner['delta_nll_percent'])} %", f"NLL against full attention: {winner['strategy']}")
            )
    return facts


def _layouts(inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Each layout as the template shows it, highest coverage first."""
    for name in sorted(inputs.layouts, key=lambda name: -inputs.coverage[name]):
        layout = inputs.layouts[name]
        yield {
            "name": name,
            "layout": layout,
            "heatmap": charts.heatmap(inputs.table, layout),
            "coverage": f"{100 * inputs.coverage[name]:.1f}",
            "interval": inputs.certainty.interval(name) if inputs.certainty else "",
            "global": [
                f"layer {layer}: " + ", ".join(str(head) for head, letter in enumerate(row) if letter == "G")
                for layer, row in enumerate(layout.heads)
                if "G" in row
            ],
        }


def _comparison_rows(inputs: Inputs) -> list[_Row]:
    comparison = inputs.comparison
    if comparison is None:
        return []
    groups = is_layout(comparison).map({True: 0, False: 1}) + (comparison["strategy"] == FULL_ATTENTION).astype(int)
    best = contenders(comparison).index[:1]  # none where no layout has been trained
    rows = []
    for index, row in comparison.iterrows():
        error = row["delta_nll_standard_error"]
        delta = signed(row["delta_nll_percent"]) + ("" if math.isnan(error) else f" ± {error:.3f}")
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
        rows.append(_Row(group, row["strategy"], index in best, cells, row["note"]))
    return sorted(rows, key=lambda row: row.group)


def _domains(table: DensityTable) -> list[tuple[str, ...]]:
    return [
        (
            str(row["domain"]),
            number(row["num_tokens"], 0),
            number(row["num_documents"], 0) if row["num_documents"] else "—",
            number(row["mean"], 3),
            number(row["std"], 3),
            number(row["agreement"], 2),
        )
        for _, row in domain_profile(table).iterrows()
    ]


def _agreement(rows: pd.DataFrame | None) -> list[tuple[str, ...]]:
    if rows is None:
        return []
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


def _provenance(inputs: Inputs) -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, (key, value) pairs): of the probe, of the comparison, and of every layout."""
    table = inputs.table
    probe = {"name": table.name, "tau": table.tau, "window": table.window, **table.metadata}
    sections = [("Probe", list(_flatten(probe))), ("Comparison", list(_flatten(inputs.summary)))]
    for name, layout in inputs.layouts.items():
        content = {"content hash": layout.content_hash, "window": layout.window, **layout.provenance}
        sections.append((f"Layout {name}", list(_flatten(content))))
    return [(heading, pairs) for heading, pairs in sections if pairs]


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


def _downloads(inputs: Inputs) -> list[tuple[str, str]]:
    """(file name, data URI) of the tables, safe to open in a spreadsheet."""
    frames = {"density.csv": inputs.table.rows}
    if inputs.comparison is not None:
        frames["comparison.csv"] = inputs.comparison
    return [(name, "data:text/csv;charset=utf-8," + quote(safe_csv(frame))) for name, frame in frames.items()]


def safe_csv(frame: pd.DataFrame) -> str:
    """CSV whose texts cannot act as formulas: one that starts with ``= + - @`` gets a leading apostrophe."""
    safe: str = frame.rename(columns=_safe_cell).map(_safe_cell).to_csv(index=False, float_format="%.6g")
    return safe


def _safe_cell(value: Any) -> Any:
    """Numbers stay numbers; leading white space does not hide a formula."""
    return f"'{value}" if isinstance(value, str) and value.lstrip().startswith(("=", "+", "-", "@")) else value


def _px(value: float) -> str:
    """A length in user units, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def _tie(sentence: str) -> str:
    """No line break before a percent sign nor around a plus-minus."""
    return sentence.replace(" %", "\N{NO-BREAK SPACE}%").replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _csp_hash(content: str) -> str:
    """The Content-Security-Policy source that allows an inline style or script of exactly this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
