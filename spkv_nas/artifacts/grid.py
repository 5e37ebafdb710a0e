"""The grid of KV heads (layers x heads): format it, and check that two grids agree."""

from __future__ import annotations

from spkv_nas.base.errors import UserError

Grid = tuple[int, int]  # (layers L, KV heads per layer Hkv)


def grid_words(grid: Grid) -> str:
    """Format a grid, such as "21 layers x 3 KV heads"."""
    return f"{grid[0]} layers x {grid[1]} KV heads"


def check_grid(what: str, grid: Grid, other: str, expected: Grid, remedy: str = "") -> None:
    """Check that two grids agree.

    Args:
        what: owner of ``grid``, such as "layout 'densest'".
        grid: grid to check.
        other: owner of the grid ``expected``, such as "the model".
        expected: grid that is required.
        remedy: what to do about a mismatch, on a line of its own.

    Raises:
        UserError: the grids differ.
    """
    if grid != expected:
        advice = f"\n{remedy}" if remedy else ""
        raise UserError(f"{what} is for {grid_words(grid)}, {other} has {grid_words(expected)}{advice}")
