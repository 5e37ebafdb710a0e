"""Show tables and layouts in notebooks, as an HTML grid of coloured cells."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import ArrayLike

_FULL = np.array([31, 95, 168])  # RGB of a cell of value 1; 0 is white
_LIGHT = 0.55  # from this value on, text is white


def grid_html(caption: str, values: ArrayLike, texts: Sequence[Sequence[str]]) -> str:
    """Return an HTML table with one column per layer and one row per KV head.

    Args:
        caption: title of the table.
        values: [L, Hkv] in [0, 1], darkness of the cells.
        texts: text of the cells, by layer and KV head.
    """
    grid = np.asarray(values, dtype=np.float64)
    head = "".join(f"<th>{layer}</th>" for layer in range(len(grid)))
    rows = [
        f"<tr><th>head {head}</th>"
        + "".join(_cell(grid[layer, head], texts[layer][head]) for layer in range(len(grid)))
        + "</tr>"
        for head in range(grid.shape[1])
    ]
    title = f"<caption>{escape(caption)}</caption>"
    return f"<table>{title}<tr><th>layer</th>{head}</tr>{''.join(rows)}</table>"


def _cell(value: float, text: str) -> str:
    """Return one coloured table cell."""
    red, green, blue = np.rint(255 + value * (_FULL - 255)).astype(int)
    ink = "white" if value >= _LIGHT else "black"
    style = f"background: rgb({red}, {green}, {blue}); color: {ink}; text-align: center"
    return f'<td style="{style}">{escape(text)}</td>'
