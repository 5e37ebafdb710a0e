"""Fit the law of NLL against training compute to runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.assets import PAPER_TABLE
from spkv_nas.base.console import out, print_path
from spkv_nas.base.workspace import Workspace
from spkv_nas.contrib.defaults import PAPER
from spkv_nas.contrib.reproduce.scaling.chart import scaling_chart
from spkv_nas.contrib.reproduce.scaling.scaling_law import describe_laws, fit_runs, read_runs, write_laws
from spkv_nas.report.figures import save_figure


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


def scaling(workspace: Workspace, file: Path | None, name: str | None) -> ScalingResult:
    """Fit the scaling law to runs, by default the paper's, and write law and figure to ``reports/<name>/``."""
    runs = read_runs(file or PAPER_TABLE)
    laws = fit_runs(runs)
    described = describe_laws(runs, laws)
    name = name or (PAPER if file is None else file.stem)
    workspace.check_writable()
    folder = workspace.report_dir(name)
    write_laws(folder, described, PAPER if file is None else str(file))
    figure = save_figure(folder, scaling_chart(runs, laws))
    return ScalingResult(name, described, folder, figure)


def show(result: ScalingResult) -> None:
    """Print the fitted scaling laws and their predictions."""
    for law in result.laws:
        _law(result.name, law)
    print_path("scaling", result.figure or result.folder / "scaling.yaml")


def _law(name: str, law: dict[str, Any]) -> None:
    """Print one scaling law: parameters, fit, and predictions of the last and the held-out runs."""
    # Fitted parameters
    title = f"{name}, {law['variant']}" if law["variant"] else name
    grid = Table("", "value", f"{law['confidence']:.0%} interval", title=escape(f"{title}: {law['law']}"))
    for parameter, (value, low, high) in law["parameters"].items():
        grid.add_row(parameter, f"{value:.4g}", f"{low:.4g} .. {high:.4g}")
    out.print(grid)
    out.print(
        f"R² {law['r_squared']:.5f} over {law['num_runs']} runs; residual standard deviation {law['residual']:.4f}"
    )
    # Prediction of the last run from the others
    last = law["leave_last_out"]
    if last["predicted"] is not None:
        out.print(
            f"last run from the others: {escape(last['name'])} predicted {last['predicted']:.4f}, "
            f"measured {last['nll']:.4f} ({last['error_percent']:+.2f} %)"
        )
    # Predictions of held-out runs
    for run in law["runs"]:
        if run["held_out"]:
            out.print(
                f"held out: {escape(run['name'])} predicted {run['predicted']:.4f} ({run['low']:.4f} .. "
                f"{run['high']:.4f}), measured {run['nll']:.4f} ({run['error_percent']:+.2f} %)"
            )
