"""The grid of KV heads (layers x heads): sizes of what has one, its format, and a check that two grids agree.

Layers may have different numbers of heads. An array [L, Hkv] then has as many columns as the largest layer, and
``OnGrid.is_head`` says which of its cells are heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base.errors import UserError

Grid = tuple[int, int]  # (layers L, KV heads Hkv of the largest layer)
_FULL = (31, 95, 168)  # RGB of a cell of value 1; 0 is white
_LIGHT = 0.55  # from this value on, text is white


class OnGrid(ABC):
    """Sizes of an object that holds a value for every KV head."""

    @property
    @abstractmethod
    def heads_per_layer(self) -> tuple[int, ...]:
        """Return the number of KV heads of every layer."""

    @property
    def grid(self) -> Grid:
        """Return (L, Hkv), the shape of arrays over heads."""
        return len(self.heads_per_layer), max(self.heads_per_layer)

    @property
    def is_head(self) -> NDArray[np.bool_]:
        """Return a bool mask [L, Hkv], false beyond the heads of a layer that has fewer than others."""
        return head_cells(self.heads_per_layer)

    @property
    def num_layers(self) -> int:
        """Return the number of layers L."""
        return self.grid[0]

    @property
    def num_kv_heads(self) -> int:
        """Return the number of KV heads Hkv of the largest layer."""
        return self.grid[1]

    @property
    def num_heads(self) -> int:
        """Return the number of KV heads of all layers."""
        return sum(self.heads_per_layer)


def head_cells(heads_per_layer: Sequence[int]) -> NDArray[np.bool_]:
    """Return a bool mask [L, Hkv], true for the KV heads that the layers have."""
    return np.asarray(np.arange(max(heads_per_layer)) < np.array(heads_per_layer)[:, None])


def grid_words(heads_per_layer: Sequence[int]) -> str:
    """Format a grid, such as "21 layers x 3 KV heads" or "48 layers x 4 to 8 KV heads"."""
    least = min(heads_per_layer)
    most = max(heads_per_layer)
    return f"{len(heads_per_layer)} layers x {most if least == most else f'{least} to {most}'} KV heads"


def check_grid(
    what: str, actual: Sequence[int], other: str, expected: Sequence[int], remedy: str = ""
) -> None:
    """Raise ``UserError`` unless ``what``, such as "layout 'densest'", has as many heads by layer as ``other``."""
    if tuple(actual) == tuple(expected):
        return
    advice = f"\n{remedy}" if remedy else ""
    words = (grid_words(actual), grid_words(expected))
    if words[0] != words[1]:
        raise UserError(f"{what} is for {words[0]}, {other} has {words[1]}{advice}")
    pairs = zip(actual, expected, strict=True)
    layer, number, needed = next(
        (layer, *pair) for layer, pair in enumerate(pairs) if pair[0] != pair[1]
    )
    raise UserError(f"{what} has {number} KV heads in layer {layer}, {other} has {needed}{advice}")


def grid_html(caption: str, values: NDArray[Any], texts: Sequence[Sequence[str]]) -> str:
    """Return an HTML table, layers across: ``values`` [L, Hkv] in [0, 1] darken cells, which hold ``texts``."""

    def cell(value: float, text: str) -> str:
        colour = ", ".join(f"{round(255 + value * (full - 255))}" for full in _FULL)
        style = f"background: rgb({colour}); color: {'white' if value >= _LIGHT else 'black'}; text-align: center"
        return f'<td style="{style}">{escape(text)}</td>'

    # List the heads of every layer below each other
    layers = range(len(values))
    header = "".join(f"<th>{layer}</th>" for layer in layers)
    rows = (
        f"<tr><th>head {head}</th>"
        + "".join(
            cell(values[x][head], texts[x][head]) if head < len(texts[x]) else "<td></td>"
            for x in layers
        )
        + "</tr>"
        for head in range(len(values[0]))
    )
    return f"<table><caption>{escape(caption)}</caption><tr><th>layer</th>{header}</tr>{''.join(rows)}</table>"
