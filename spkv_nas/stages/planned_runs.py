"""Print the runs of a plan, for ``--dry-run`` and ``init``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import caution, out, say
from spkv_nas.base.units import format_seconds

if TYPE_CHECKING:
    from spkv_nas.training.run_plan import Plan


def show(result: Plan) -> None:
    """Print the runs of a plan, their steps, tokens and time, and its remarks."""
    grid = Table("", "steps", "tokens", "time", "", title=f"{escape(result.name)}: planned work")
    for run in result.runs:
        steps = f"{run.steps:,}" if run.steps else "-"
        grid.add_row(escape(run.name), steps, f"{run.tokens:,}", format_seconds(run.seconds), run.state)
    out.print(grid)
    tokens = sum(run.tokens for run in result.runs)
    total = f"{tokens:,} tokens, {format_seconds(result.seconds)}" if tokens else "nothing left to do"
    say("\n".join([f"total: {total}", *result.remarks]))
    if not result.fits:
        caution("the planned work does not fit in memory")


def document(result: Plan) -> dict[str, Any]:
    """Return the planned runs, their total time, and whether they fit in memory."""
    return {**vars(result), "seconds": result.seconds, "fits": result.fits}
