"""The grid of KV heads (layers x heads): sizes of what has one, its format, and a check that two grids agree.

Layers may have different numbers of heads. An array [L, Hkv] then has as many columns as the largest layer, and
``OnGrid.is_head`` says which of its cells are heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape

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
    number = f"{most}" if least == most else f"{least} to {most}"
    return f"{len(heads_per_layer)} layers x {number} KV heads"


def check_grid(
    what: str, actual: Sequence[int], other: str, expected: Sequence[int], remedy: str = ""
) -> None:
    """Raise ``UserError`` unless ``what``, such as "layout 'densest'", has as many heads by layer as ``other``."""
    if tuple(actual) == tuple(expected):
        return
    advice = f"\n{remedy}" if remedy else ""
    actual_words = grid_words(actual)
    expected_words = grid_words(expected)
    if actual_words != expected_words:
        raise UserError(f"{what} is for {actual_words}, {other} has {expected_words}{advice}")
    # Name the first layer that differs
    for layer, (number, needed) in enumerate(zip(actual, expected, strict=True)):
        if number != needed:
            raise UserError(
                f"{what} has {number} KV heads in layer {layer}, {other} has {needed}{advice}"
            )


def grid_html(caption: str, values: NDArray[np.generic], texts: Sequence[Sequence[str]]) -> str:
    """Return an HTML table, layers across: ``values`` [L, Hkv] in [0, 1] darken cells, which hold ``texts``."""
    num_layers, num_heads = values.shape
    header = "".join(f"<th>{layer}</th>" for layer in range(num_layers))
    rows = [f"<tr><th>layer</th>{header}</tr>"]
    # List the heads of every layer below each other
    for head in range(num_heads):
        cells = [f"<th>head {head}</th>"]
        for layer in range(num_layers):
            is_head = head < len(texts[layer])
            cells.append(
                _cell(float(values[layer, head]), texts[layer][head]) if is_head else "<td></td>"
            )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><caption>{escape(caption)}</caption>{''.join(rows)}</table>"


def _cell(value: float, text: str) -> str:
    """Return a cell with a text, on a background as dark as its value, in [0, 1]."""
    background = ", ".join(f"{round(255 + value * (full - 255))}" for full in _FULL)
    colour = "white" if value >= _LIGHT else "black"
    style = f"background: rgb({background}); color: {colour}; text-align: center"
    return f'<td style="{style}">{escape(text)}</td>'
