"""Draw head scores and layouts for notebooks, and the SP-KV paper's figures of one's own probe as PDF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.files import write_atomic
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report import density_charts
from spkv_nas.report.chart import Chart, Panels
from spkv_nas.report.plot import Picture, picture, save_pdf
from spkv_nas.report.result_charts import coverage_nll_chart, tau_sweep_chart

_WIDTHS = {  # in text widths, as in the paper
    "layouts": 0.5,
    "coverage-nll": 0.46,
    "density": 0.95,
    "density-evolution": 0.7,
    "tau-sweep": 0.48,
}


def write_paper_figures(
    folder: Path,
    table: HeadScores,
    layouts: Mapping[str, Layout],
    *,
    comparison: pd.DataFrame | None = None,
    evolution: pd.DataFrame | None = None,
    sweep: pd.DataFrame | None = None,
) -> Path:
    """Write the figures that have data into ``folder`` and return the path of ``figures.tex``.

    ``evolution`` is a table of ``head_tables``, ``sweep`` one of ``evaluation.sweep``; the others are as in
    ``ReportInputs``.
    """
    charts: list[Chart | Panels | None] = [
        density_charts.layout_charts(
            table, layouts, {name: coverage(table, layout) for name, layout in layouts.items()}
        ),
        None if comparison is None else coverage_nll_chart(comparison, table.measure.noun),
        density_charts.density_chart(table),
        None if evolution is None else density_charts.density_evolution_chart(evolution),
        None if sweep is None else tau_sweep_chart(sweep),
    ]
    # Draw the charts that have data, and include them in LaTeX
    available = [chart for chart in charts if chart is not None]
    for chart in available:
        save_pdf(folder, chart)
    lines = [f"\\includegraphics[width={_WIDTHS[chart.name]}\\textwidth]{{{chart.name}.pdf}}" for chart in available]
    write_atomic(folder / "figures.tex", "\n".join([*lines, ""]))
    return folder / "figures.tex"


def plot_head_scores(scores: HeadScores) -> Picture:
    """Plot the score of every KV head as a matplotlib figure, as in the report."""
    return picture(density_charts.density_chart(scores))


def plot_layout(layout: Layout, scores: HeadScores | None = None) -> Picture:
    """Plot a layout's global heads as a matplotlib figure; with head scores, marked on these as in the report.

    Raises:
        UserError: the scores have another grid.
    """
    if scores is None:
        return picture(density_charts.grid_chart(layout))
    return picture(density_charts.layout_chart(scores, layout.strategy, layout, coverage(scores, layout), number=1))
