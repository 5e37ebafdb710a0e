"""Compute and draw the FLOPs of the paper's model ladder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path
from spkv_nas.base.workspace import Workspace
from spkv_nas.cost.ladder import flops_table, write_flops_table
from spkv_nas.report.cost_charts import flops_charts
from spkv_nas.report.figures import save_figure


@dataclass(frozen=True)
class LadderResult:
    """Result of ``reproduce ladder``.

    Attributes:
        rows: FLOPs of each level, as of ``cost.ladder.flops_table``.
        context: tokens in the context.
        density: share of the keys that SP-KV keeps.
        folder: folder of the results.
        figure: path of the figure; None where the plotting library is not installed.
    """

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
    write_flops_table(folder, rows)
    figure = save_figure(folder, flops_charts(rows, tokens, density))
    return LadderResult(rows, tokens, density, folder, figure)


def show(result: LadderResult) -> None:
    """Print each level's FLOPs per token, with full attention and with SP-KV."""
    sparse = f"density {result.density:g}"
    grid = Table(
        "level", "parameters, M", "attention\nfull", f"attention\n{sparse}", "total\nfull", f"total\n{sparse}",
        title=f"forward GFLOPs per token at {result.context:,} tokens",
    )  # fmt: skip
    for row in result.rows.itertuples():
        flops = (row.attention_dense, row.attention_sparse, row.total_dense, row.total_sparse)
        grid.add_row(escape(row.name), f"{row.num_parameters / 1e6:,.4g}", *(f"{value / 1e9:,.4g}" for value in flops))
    out.print(grid)
    print_path("ladder", result.figure or result.folder / "flops.csv")
