"""The grid of KV heads (layers x heads): sizes of what has one, its format, and a check that two grids agree."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from spkv_nas.base.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Grid = tuple[int, int]  # (layers L, KV heads per layer Hkv)
_FULL = (31, 95, 168)  # RGB of a cell of value 1; 0 is white
_LIGHT = 0.55  # from this value on, text is white


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
    """Raise ``UserError`` if the ``grid`` of ``what``, such as "layout 'densest'", is not the one of ``other``."""
    if grid != expected:
        advice = f"\n{remedy}" if remedy else ""
        raise UserError(f"{what} is for {grid_words(grid)}, {other} has {grid_words(expected)}{advice}")


def grid_html(caption: str, values: "NDArray[Any]", texts: Sequence[Sequence[str]]) -> str:
    """Return an HTML table, layers across: ``values`` [L, Hkv] in [0, 1] darken cells, which hold ``texts``."""

    def cell(value: float, text: str) -> str:
        colour = ", ".join(f"{round(255 + value * (full - 255))}" for full in _FULL)
        style = f"background: rgb({colour}); color: {'white' if value >= _LIGHT else 'black'}; text-align: center"
        return f'<td style="{style}">{escape(text)}</td>'

    # List the heads of every layer below each other
    layers = range(len(values))
    header = "".join(f"<th>{layer}</th>" for layer in layers)
    rows = (
        f"<tr><th>head {head}</th>{''.join(cell(values[layer][head], texts[layer][head]) for layer in layers)}</tr>"
        for head in range(len(values[0]))
    )
    return f"<table><caption>{escape(caption)}</caption><tr><th>layer</th>{header}</tr>{''.join(rows)}</table>"
