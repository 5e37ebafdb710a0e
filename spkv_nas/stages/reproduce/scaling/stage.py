"""Fit the law of NLL against training compute to runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spkv_nas.base.assets import PAPER_TABLE
from spkv_nas.cost.scaling_law import describe_laws, fit_runs, read_runs, write_laws
from spkv_nas.report.cost_charts import scaling_chart
from spkv_nas.report.figures import save_figure
from spkv_nas.stages.options import PAPER
from spkv_nas.stages.reproduce.scaling.options import ScalingOptions


@dataclass(frozen=True)
class ScalingResult:
    """Result of ``reproduce scaling``.

    Attributes:
        name: name of the results.
        laws: fitted laws, as of ``describe_laws``.
        folder: folder of the results.
        figure: path of the figure; None where the plotting library is not installed.
    """

    name: str
    laws: list[dict[str, Any]]
    folder: Path
    figure: Path | None


def scaling(options: ScalingOptions) -> ScalingResult:
    """Fit the scaling law to runs, by default the paper's, and write law and figure to ``reports/<name>/``."""
    runs = read_runs(options.runs or PAPER_TABLE)
    laws = fit_runs(runs)
    described = describe_laws(runs, laws)
    name = options.name or (PAPER if options.runs is None else options.runs.stem)
    options.folders.check_writable()
    source = PAPER if options.runs is None else str(options.runs)
    folder = options.folders.report_dir(name)
    write_laws(folder, described, source)
    figure = save_figure(folder, scaling_chart(runs, laws))
    return ScalingResult(name, described, folder, figure)
