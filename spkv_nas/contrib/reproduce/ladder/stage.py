"""Compute and draw the FLOPs of the paper's model ladder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path
from spkv_nas.base.tables import write_csv
from spkv_nas.base.workspace import Workspace
from spkv_nas.contrib.reproduce.ladder.chart import flops_charts
from spkv_nas.cost.formulas import attention_flops, flops_per_token
from spkv_nas.cost.ladder import ladder as levels
from spkv_nas.report.figures import save_figure


@dataclass(frozen=True)
class LadderResult:
    """Result of ``reproduce ladder``.

    Attributes:
        rows: FLOPs of each level, as of ``flops_table``.
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
    write_csv(folder / "flops.csv", rows)
    figure = save_figure(folder, flops_charts(rows, tokens, density))
    return LadderResult(rows, tokens, density, folder, figure)


def flops_table(context: int, density: float) -> pd.DataFrame:
    """Return the forward FLOPs per token of the paper's levels, dense and at a density, sorted by model size.

    Args:
        context: tokens in the context.
        density: share of the keys that sparse attention keeps.

    Returns:
        Columns name, num_parameters, attention_dense, attention_sparse, total_dense, total_sparse.

    Raises:
        UserError: as ``visible_keys``.
    """
    shapes = {level.name: level.shape for level in levels().values() if not level.name.startswith("micro")}
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
        "level", "parameters, M", "attention\nfull", f"attention\n{sparse}", "total\nfull", f"total\n{sparse}",
        title=f"forward GFLOPs per token at {result.context:,} tokens",
    )  # fmt: skip
    for row in result.rows.itertuples():
        flops = (row.attention_dense, row.attention_sparse, row.total_dense, row.total_sparse)
        grid.add_row(escape(row.name), f"{row.num_parameters / 1e6:,.4g}", *(f"{value / 1e9:,.4g}" for value in flops))
    out.print(grid)
    print_path("ladder", result.figure or result.folder / "flops.csv")
