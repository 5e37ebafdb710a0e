"""Print what ``evaluate`` measured on held-out text: one checkpoint, a pair of them, or a threshold sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from spkv_nas.cli.console import out, say_where
from spkv_nas.cli.show import about_errors, change

if TYPE_CHECKING:
    from spkv_nas.stages.evaluate import EvaluationResult


def evaluation(result: EvaluationResult) -> None:
    """Print held-out NLL, the difference to another checkpoint, or a threshold sweep."""
    evaluation, nll = result.evaluation, result.evaluation.nll
    text = f"{nll.num_tokens.sum():,} tokens in {nll.num_documents} documents"
    # One checkpoint, or a pair
    if result.sweep is None:
        density_note = (
            f", density {100 * evaluation.density:.1f} % at tau {evaluation.tau:g}"
            if evaluation.density is not None
            else ""
        )
        text += f" (effective number {nll.effective_documents:.1f})"
        out.print(f"[bold]{escape(result.name)}[/bold]: NLL {nll.mean:.4f}{density_note}; {text}")
        if result.pair is not None:
            difference = change(result.pair.change.percent, result.pair.change.standard_error)
            out.print(
                f"against {escape(result.pair.against)}: NLL {result.pair.evaluation.nll.mean:.4f}; "
                f"difference {difference} %"
            )
            about_errors(nll.num_documents, nll.effective_documents)
            say_where("table", result.folder / "evaluation.csv")
        return
    # Sweep of thresholds
    grid = Table("tau", "density %", "NLL", "ΔNLL %", title=f"{escape(result.name)}: {text}")
    for row in result.sweep.itertuples():
        difference = change(row.delta_nll_percent, row.delta_nll_standard_error) if row.tau else "-"
        grid.add_row(f"{row.tau:.4g}" if row.tau else "open", f"{100 * row.density:.1f}", f"{row.nll:.4f}", difference)
    out.print(grid)
    about_errors(nll.num_documents, nll.effective_documents)
    say_where("sweep", result.folder / "tau-sweep.png")
