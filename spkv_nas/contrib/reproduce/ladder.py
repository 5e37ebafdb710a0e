"""Compute and draw the FLOPs of the paper's model ladder."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.markup import escape
from rich.table import Table

from spkv_nas.base import console, tables
from spkv_nas.base.workspace import Workspace
from spkv_nas.cost.formulas import attention_flops, flops_per_token
from spkv_nas.cost.ladder import ladder as levels
from spkv_nas.report.chart import (
    Chart,
    Dash,
    Line,
    Mark,
    Panels,
    Points,
    Tone,
    decades_axis,
    numbers,
)
from spkv_nas.report.result_charts import save_figure


@dataclass(frozen=True)
class LadderResult:
    """FLOPs of each level at a context and a density, and their figure; None where the plotting library is missing."""

    rows: pd.DataFrame
    context: int
    density: float
    folder: Path
    figure: Path | None


def ladder(workspace: Workspace, name: str, tokens: int, density: float) -> LadderResult:
    """Write FLOPs of the ladder's levels, dense and at a density, and their figure to ``reports/<name>/``."""
    rows = flops_table(tokens, density)
    workspace.check_writable()
    folder = workspace.report_dir(name)
    tables.write_csv(folder / "flops.csv", rows)
    figure = save_figure(folder, flops_charts(rows, tokens, density))
    return LadderResult(rows, tokens, density, folder, figure)


def flops_table(context: int, density: float) -> pd.DataFrame:
    """Return the forward FLOPs per token of the paper's levels, dense and at a density, sorted by model size.

    ``context`` is in tokens. Columns: name, num_parameters, attention_dense, attention_sparse, total_dense,
    total_sparse.
    """
    shapes = {
        level.name: level.shape for level in levels().values() if not level.name.startswith("micro")
    }
    rows = pd.DataFrame(
        {
            "name": name,
            "num_parameters": shape.num_parameters,
            "attention_dense": attention_flops(shape, context),
            "attention_sparse": attention_flops(shape, context, density=density),
            "total_dense": flops_per_token(shape, context),
            "total_sparse": flops_per_token(shape, context, density=density),
        }
        for name, shape in shapes.items()
    )
    return rows.sort_values("num_parameters")


def show(result: LadderResult) -> None:
    """Print each level's FLOPs per token, with full attention and with SP-KV."""
    sparse = f"density {result.density:g}"
    grid = Table(
        "level",
        "parameters, M",
        "attention\nfull",
        f"attention\n{sparse}",
        "total\nfull",
        f"total\n{sparse}",
        title=f"forward GFLOPs per token at {result.context:,} tokens",
    )
    for row in result.rows.itertuples():
        flops = (row.attention_dense, row.attention_sparse, row.total_dense, row.total_sparse)
        grid.add_row(
            escape(row.name),
            f"{row.num_parameters / 1e6:,.4g}",
            *(f"{value / 1e9:,.4g}" for value in flops),
        )
    console.out.print(grid)
    console.print_path("ladder", result.figure or result.folder / "flops.csv")


def flops_charts(rows: pd.DataFrame, context: int, density: float) -> Panels:
    """Return forward FLOPs per token against model size: attention and total, dense and at a density.

    SP-KV paper, figure "Per-token inference attention (left) and total (right) FLOPs". ``rows`` is a ``flops_table``.
    """
    size = numbers(rows["num_parameters"], 1e-9)
    parts = ("attention", "total")
    values = rows.drop(columns=["name", "num_parameters"]).to_numpy(dtype=np.float64) / 1e9
    # Give all charts the same axes
    axes = (
        decades_axis(
            "Parameters without embeddings, billions",
            min(size) / 1.2,
            max(size) * 1.2,
            multiples=(1, 2, 5),
        ),
        decades_axis(
            "GFLOPs per token, forward", values.min() / 1.3, values.max() * 1.3, multiples=(1, 2, 5)
        ),
    )
    kinds: tuple[tuple[str, str, Tone, Dash], ...] = (
        ("dense", "full attention", "ink", "solid"),
        ("sparse", f"density {density:g}", "accent", "dashed"),
    )
    # Draw a chart for each part
    charts = []
    for part in parts:
        marks: list[Mark] = []
        for kind, label, tone, dash in kinds:
            gigaflops = numbers(rows[f"{part}_{kind}"], 1e-9)
            marks += [
                Line(size, gigaflops, label, tone, dash, 1.8),
                Points(size, gigaflops, tone=tone, size=3.0),
            ]
        heading = f"{part}, {context:,} tokens of context"
        charts.append(Chart(f"flops-{part}", heading, *axes, tuple(marks), heading=heading))
    return Panels("flops", tuple(charts))
