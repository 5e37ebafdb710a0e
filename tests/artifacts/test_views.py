"""Test how tables and layouts render in a notebook."""

from __future__ import annotations

import re

import numpy as np
import pytest
from helpers import make_domain_table

from spkv_nas import Layout, UserError, plot_head_scores, plot_layout
from spkv_nas.artifacts.grid import grid_html
from spkv_nas.report.plot import Picture


def texts(html: str) -> list[str]:
    """Return the texts of the cells, row by row."""
    return re.findall("<td[^>]*>([^<]*)</td>", html)


def test_a_layer_is_a_column_and_a_head_a_row() -> None:
    html = grid_html(
        "a < b",
        np.array([[0.0, 1.0], [0.25, 0.5], [0.0, 0.0]]),
        [["a", "b"], ["c", "d"], ["e", "<"]],
    )
    assert texts(html) == ["a", "c", "e", "b", "d", "&lt;"]
    assert "<caption>a &lt; b</caption>" in html
    assert html.count("rgb(255, 255, 255); color: black") == 3
    assert html.count("rgb(31, 95, 168); color: white") == 1


def test_a_table_shows_its_densities() -> None:
    table = make_domain_table()
    shown = [float(text) for text in texts(table._repr_html_())]
    assert shown == np.rint(100 * table.density.T).ravel().tolist()
    assert table.name in table._repr_html_()


def test_a_layout_shows_its_global_heads() -> None:
    layout = Layout(("GL", "LL", "LG"), 8, "mine")
    assert texts(layout._repr_html_()) == ["G", " ", " ", " ", " ", "G"]
    assert "mine: 2 of 6 KV heads global, window 8" in layout._repr_html_()


@pytest.mark.usefixtures("whole_pictures")
def test_pictures() -> None:
    table = make_domain_table()
    layout = Layout.from_mask(table.density > table.mean, window=8)
    for picture in (plot_head_scores(table), plot_layout(layout), plot_layout(layout, table)):
        assert isinstance(picture, Picture)
        assert picture._repr_png_().startswith(b"\x89PNG")
    assert "coverage" in plot_layout(layout, table).axes[0].get_title(loc="left")
    assert "global" in plot_layout(layout).axes[0].get_title(loc="left")
    with pytest.raises(UserError, match="is for 1 layers"):
        plot_layout(Layout(("GL",), 8), table)
