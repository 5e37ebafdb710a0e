"""Print the FLOPs of the paper's model ladder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path

if TYPE_CHECKING:
    from spkv_nas.stages.reproduce.ladder.stage import LadderResult


def ladder(result: LadderResult) -> None:
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
