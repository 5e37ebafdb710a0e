"""The grid of KV heads, layers by heads: its words, and the one check that two of them agree."""

from __future__ import annotations

from spkv_nas.base.errors import UserError

Grid = tuple[int, int]  # (layers L, KV heads per layer Hkv)


def grid_words(grid: Grid) -> str:
    """Such as "21 layers x 3 KV heads"."""
    return f"{grid[0]} layers x {grid[1]} KV heads"


def check_grid(what: str, grid: Grid, other: str, expected: Grid, remedy: str = "") -> None:
    """Raises ``UserError`` unless the two grids agree.

    Args:
        what: what has ``grid``, such as "layout 'densest'".
        other: what has the grid ``expected``, such as "the model".
        remedy: what to do, on a line of its own.
    """
    if grid != expected:
        advice = f"\n{remedy}" if remedy else ""
        raise UserError(f"{what} is for {grid_words(grid)}, {other} has {grid_words(expected)}{advice}")
