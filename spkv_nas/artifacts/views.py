"""Notebook views of tables and layouts: an HTML grid of coloured cells, and a matplotlib figure on request.

The figures are those of ``report``, a package above this one in the import order. They are imported by name, as pandas
imports its plotting backends, so that tables can be read without matplotlib.
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


def picture(kind: str, *shown: Any) -> Figure:
    """Call a function of ``report.pictures`` by name and return its figure.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        figure: Figure = getattr(import_module("spkv_nas.report.pictures"), kind)(*shown)
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error
    return figure
