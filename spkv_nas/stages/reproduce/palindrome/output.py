"""Print the palindrome comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from spkv_nas.base.console import out, print_path

if TYPE_CHECKING:
    from spkv_nas.stages.reproduce.palindrome.stage import PalindromeResult


def palindrome(result: PalindromeResult) -> None:
    """Print NLL, utility, density and training time of each kind of attention."""
    grid = Table("attention", "NLL", "hard NLL", "mean utility", "density %", "seconds", title="nats per output token")
    for row in result.rows.itertuples():
        has_gates = row.hard_nll == row.hard_nll  # not NaN
        gate_cells = (f"{row.hard_nll:.4f}", f"{row.mean_utility:.3f}") if has_gates else ("-", "-")
        grid.add_row(row.variant, f"{row.nll:.4f}", *gate_cells, f"{100 * row.density:.1f}", f"{row.seconds:.0f}")
    out.print(grid)
    print_path("figure", result.folder / "palindrome.png")
