"""Fit the law of NLL against training compute to runs, and draw it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.markup import escape
from rich.table import Table

from spkv_nas.base import assets, console, records, replace, version
from spkv_nas.base.workspace import Workspace
from spkv_nas.contrib.defaults import PAPER
from spkv_nas.contrib.reproduce.scaling import scaling_law
from spkv_nas.report import axes, chart, figures


@dataclass(frozen=True)
class ScalingResult:
    """Laws as of ``describe_laws``, and their figure; None where the plotting library is not installed."""

    name: str
    laws: list[dict[str, Any]]
    folder: Path
    figure: Path | None


def scaling(workspace: Workspace, file: Path | None) -> ScalingResult:
    """Fit the scaling law to runs, by default the paper's, and write law and figure to ``reports/<name>/``."""
    runs = scaling_law.read_runs(file or assets.PAPER_TABLE)
    laws = scaling_law.fit_runs(runs)
    described = scaling_law.describe_laws(runs, laws)
    name = PAPER if file is None else file.stem
    workspace.check_writable()
    folder = workspace.report_dir(name)
    record = {"source": PAPER if file is None else str(file), "fits": described, "environment": version.environment()}
    with replace.replacing(folder) as new:
        records.write_record(new / "scaling.yaml", record)
    figure = figures.save_figure(folder, scaling_chart(runs, laws))
    return ScalingResult(name, described, folder, figure)


def show(result: ScalingResult) -> None:
    """Print the fitted scaling laws and their predictions."""
    for law in result.laws:
        _law(result.name, law)
    console.print_path("scaling", result.figure or result.folder / "scaling.yaml")


def _law(name: str, law: dict[str, Any]) -> None:
    """Print one scaling law: parameters, fit, and predictions of held-out runs."""
    # Fitted parameters
    title = f"{name}, {law['variant']}" if law["variant"] else name
    grid = Table("", "value", f"{law['confidence']:.0%} interval", title=escape(f"{title}: {law['law']}"))
    for parameter, (value, low, high) in law["parameters"].items():
        grid.add_row(parameter, f"{value:.4g}", f"{low:.4g} .. {high:.4g}")
    console.out.print(grid)
    residual = f"residual standard deviation {law['residual']:.4f}"
    console.out.print(f"R² {law['r_squared']:.5f} over {law['num_runs']} runs; {residual}")
    # Predictions of held-out runs
    for run in law["runs"]:
        if run["held_out"]:
            console.out.print(
                f"held out: {escape(run['name'])} predicted {run['predicted']:.4f} ({run['low']:.4f} .. "
                f"{run['high']:.4f}), measured {run['nll']:.4f} ({run['error_percent']:+.2f} %)"
            )


def scaling_chart(runs: pd.DataFrame, laws: dict[str, scaling_law.ScalingLaw]) -> chart.Chart:
    """Return NLL against training compute on logarithmic axes: runs, fitted laws, prediction intervals.

    Filled points are fitted, hollow ones held out. SP-KV paper, figure "Validation NLL and training compute". ``runs``
    has the columns of ``read_runs``.
    """
    # Compute grid and range of NLL
    flops = np.geomspace(runs["train_flops"].min() / 1.5, runs["train_flops"].max() * 1.5, 100)
    nlls = np.concatenate([runs["nll"], *(law(flops) for law in laws.values())])
    floor, ceiling = float(nlls.min()) / 1.03, float(nlls.max()) * 1.03
    compute_grid = chart.numbers(flops)
    marks: list[chart.Mark] = []
    points: list[chart.Mark] = []
    # Law and interval of each variant
    for number, (variant, law) in enumerate(laws.items()):
        tone, dash = chart.SERIES[number % len(chart.SERIES)]
        intervals = [law.predict(compute) for compute in compute_grid]
        low, high = (
            chart.numbers(np.clip([getattr(interval, side) for interval in intervals], floor, ceiling))
            for side in ("low", "high")
        )
        label = "" if number else f"{scaling_law.CONFIDENCE:.0%} interval of one run"
        marks += [
            chart.Band(compute_grid, low, high, label, tone, 0.15),
            chart.Line(compute_grid, chart.numbers(law(flops)), _formula(variant, law), tone, dash, 1.8),
        ]
        # Fitted and held-out runs of the variant
        rows = runs[runs["variant"] == variant]
        held_out = rows["held_out"].to_numpy(dtype=bool)
        for selected, hollow in ((~held_out, False), (held_out, True)):
            if selected.any():
                subset = rows[selected]
                run_names = tuple(subset["name"].astype(str)) if len(laws) == 1 else ()
                xy = chart.numbers(subset["train_flops"]), chart.numbers(subset["nll"])
                points.append(chart.Points(*xy, names=run_names, tone=tone, size=3.8, hollow=hollow))
    if runs["held_out"].any():
        points.append(chart.Points((), (), label="held out of the fit", tone="muted", size=3.8, hollow=True))
    return chart.Chart(
        "scaling",
        "NLL by training compute",
        axes.decades_axis("Training compute, FLOPs", compute_grid[0], compute_grid[-1], powers=True),
        axes.log_axis("NLL, nats per token", floor, ceiling),
        (*marks, *points),
    )


def _formula(variant: str, law: scaling_law.ScalingLaw) -> str:
    """Return a fitted law as text, such as ``2.1 + 3.4 C^-0.05``."""
    text = f"{law.irreducible.value:.3g} + {law.amplitude.value:.3g} C^{-law.exponent.value:.3g}"
    text = text.replace("^-", "^\N{MINUS SIGN}").replace("+ -", "\N{MINUS SIGN} ")
    return f"{variant}: {text}" if variant else text
