"""Print training-free KV-cache pruning for people."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path
from spkv_nas.stages.printing import about_errors, change
from spkv_nas.stages.subject import NLLTable


def show(result: NLLTable) -> None:
    """Print every method at each density, and the SP-KV checkpoint at each threshold."""
    title = f"{escape(result.name)}: training-free cache pruning"
    grid = Table("method", "sinks", "density %", "NLL", "ΔNLL %", title=title)
    for row in result.rows.itertuples():
        method = f"{row.method}, tau {row.tau:g}" if row.tau == row.tau else row.method
        difference = change(row.delta_nll_percent, row.delta_nll_standard_error) if row.Index else "-"
        sinks = "-" if row.sinks != row.sinks else f"{row.sinks:g}"
        grid.add_row(method, sinks, f"{100 * row.density:.1f}", f"{row.nll:.4f}", difference)
    out.print(grid)
    about_errors(result.num_documents, result.effective_documents)
    print_path("figure", result.folder / "baselines.png")
