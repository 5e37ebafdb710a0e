"""The grid of KV heads (layers x heads): sizes of what has one, its format, and a check that two grids agree."""

from __future__ import annotations

from abc import ABC, abstractmethod

from spkv_nas.base.errors import UserError

Grid = tuple[int, int]  # (layers L, KV heads per layer Hkv)


class OnGrid(ABC):
    """Sizes of an object that holds a value for every KV head."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """Return (L, Hkv)."""

    @property
    def num_layers(self) -> int:
        """Return the number of layers L."""
        return self.grid[0]

    @property
    def num_kv_heads(self) -> int:
        """Return the number of KV heads per layer Hkv."""
        return self.grid[1]

    @property
    def num_heads(self) -> int:
        """Return the number of KV heads, L * Hkv."""
        return self.grid[0] * self.grid[1]


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
