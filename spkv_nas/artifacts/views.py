"""How tables and layouts show themselves in a notebook: a grid of coloured cells at once, a picture on request.

The picture is the report's, which lies floors above this one. It is asked for by name, as pandas asks for its plotting
backends, so that a table can be read where there is no matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from spkv_nas.base.extras import missing_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FULL = np.array([31, 95, 168])  # red, green, blue of a cell of value 1; 0 is white
_LIGHT = 0.55  # value from which on letters are white


def grid_html(caption: str, values: ArrayLike, texts: Sequence[Sequence[str]]) -> str:
    """An HTML table with a column per layer and a row per KV head.

    Args:
        values: [L, Hkv] in [0, 1], the darkness of the cells.
        texts: of the cells, by layer and KV head.
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
    red, green, blue = np.rint(255 + value * (_FULL - 255)).astype(int)
    ink = "white" if value >= _LIGHT else "black"
    style = f"background: rgb({red}, {green}, {blue}); color: {ink}; text-align: center"
    return f'<td style="{style}">{escape(text)}</td>'


def picture(kind: str, *shown: Any) -> Figure:
    """A function of ``report.pictures``, called. Raises ``UserError`` where matplotlib is not installed."""
    try:
        figure: Figure = getattr(import_module("spkv_nas.report.pictures"), kind)(*shown)
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error
    return figure
