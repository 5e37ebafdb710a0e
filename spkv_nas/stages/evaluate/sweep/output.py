"""Print a sweep of thresholds for people, and return it as a document."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path
from spkv_nas.stages.evaluate.cells import evaluation_document
from spkv_nas.stages.evaluate.sweep.stage import SweepResult
from spkv_nas.stages.printing import about_errors, change


def show(result: SweepResult) -> None:
    """Print NLL and density at every threshold."""
    nll = result.evaluation.nll
    text = f"{nll.num_tokens.sum():,} tokens in {nll.num_documents} documents"
    grid = Table("tau", "density %", "NLL", "ΔNLL %", title=f"{escape(result.name)}: {text}")
    for row in result.rows.itertuples():
        difference = change(row.delta_nll_percent, row.delta_nll_standard_error) if row.tau else "-"
        grid.add_row(f"{row.tau:.4g}" if row.tau else "open", f"{100 * row.density:.1f}", f"{row.nll:.4f}", difference)
    out.print(grid)
    about_errors(nll.num_documents, nll.effective_documents)
    print_path("sweep", result.folder / "tau-sweep.png")


def document(result: SweepResult) -> dict[str, Any]:
    """Return the evaluation with open gates, and every threshold's."""
    evaluation = evaluation_document(result.evaluation)
    return {"name": result.name, **evaluation, "sweep": result.rows, "folder": result.folder}
