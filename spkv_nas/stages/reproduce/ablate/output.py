"""Print a table of ablations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path
from spkv_nas.stages.printing import change

if TYPE_CHECKING:
    from spkv_nas.stages.reproduce.ablate.stage import AblationResult


def ablations(result: AblationResult) -> None:
    """Print density and NLL of each row, and their change from the first."""
    title = f"{escape(result.name)}: Δ relative to the first row"
    grid = Table("", "density %", "Δ density %", "NLL", "ΔNLL %", title=title)
    for row in result.rows.itertuples():
        nll_change = change(row.delta_nll_percent, row.delta_nll_standard_error) if row.Index else "-"
        density_change = f"{row.delta_density_percent:+.1f}" if row.Index else "-"
        grid.add_row(escape(row.name), f"{row.density_percent:.1f}", density_change, f"{row.nll:.4f}", nll_change)
    out.print(grid)
    print_path("table", result.folder / "ablations.csv")
