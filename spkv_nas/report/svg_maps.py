"""Draw heatmaps as inline SVG for the report page: large ones with values, small ones with a layout's heads marked.

Cells are one path per shade, in units of a cell, which keeps maps of thousands of cells short; small maps with the same
values reuse the cells of the large one. The page's script adds an invisible layer of cells for tooltips.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from markupsafe import Markup

from spkv_nas.report.chart import Chart, Heatmap
from spkv_nas.report.colours import SHADES, cividis

LEFT = 58.0  # from the left edge of a large map to its cells
_WIDEST = 1048  # greatest width of a map's cells on the page
_FILLED = 0.92  # painted share of a cell's width and height
_ON = {"#000": "on-light", "#fff": "on-dark"}  # CSS class of text on a shade


def draw_map(chart: Chart, cells: Heatmap) -> Element:
    """Return a chart's cells with the names of its rows and columns."""
    # Sizes
    columns, rows = len(cells.values[0]), len(cells.values)
    step = float(min(48, max(26, _WIDEST // columns))) if cells.written else 18.0
    left, top = (LEFT, 4.0) if cells.written else (20.0 if chart.y.ticks else 0.0, 6.0)
    foot = 20 if cells.written else 18 if chart.x.ticks else 4
    width, height = left + columns * step + 4, top + rows * step + foot
    root = svg(chart, "map" if cells.written else "small", width, height)
    root.set("width", px(width if cells.written else 1.4 * width))
    # Cells, with their values or the marks of a layout
    group = add(root, "g", class_="cells", transform=f"translate({px(left)} {px(top)}) scale({px(step)})")
    if cells.same_as:
        add(group, "use", href=f"#{cells.same_as}-cells")
    else:
        _draw_cells(add(group, "g", id=f"{chart.name}-cells"), cells)
    if cells.written:
        root.set("data-map", f"{columns} {px(step)} {px(left)} {px(top)}")
        root.set("height", px(height))
        _write_values(add(root, "g", class_="values"), cells, step, left, top)
    else:
        _mark_chosen(group, cells)
    # Names of columns and rows
    columns_at = [(left + (value + _FILLED / 2) * step, text) for value, text in chart.x.ticks]
    along(root, columns_at, class_="tick", y=height - 5, text_anchor="middle")
    for value, text in chart.y.ticks:
        y = top + (value + _FILLED / 2) * step
        add(root, "text", text, class_="tick", x=left - 8 if cells.written else 14, y=y, dy=".35em", text_anchor="end")
    return root


def _draw_cells(group: Element, cells: Heatmap) -> None:
    """Draw each cell as a short thick line, one path per shade; empty cells are left out."""
    group.set("transform", f"translate(0 {px(_FILLED / 2)})")
    group.set("stroke-width", px(_FILLED))
    shades: dict[str, str] = defaultdict(str)
    for row, values in enumerate(cells.values):
        for column, value in enumerate(values):
            if not math.isnan(value):
                shades[_look(cells, value)[0]] += f"M{column} {row}h{px(_FILLED).removeprefix('0')}"
    for shade, path in shades.items():
        add(group, "path", d=path, stroke=shade)


def _write_values(group: Element, cells: Heatmap, step: float, left: float, top: float) -> None:
    """Write the value of every cell."""
    for row, values in enumerate(cells.values):
        lines: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for column, value in enumerate(values):
            if not math.isnan(value):
                x = left + round((column + _FILLED / 2) * step)
                lines[_look(cells, value)[1]].append((x, cells.scale.text(value)))
        for ink_class, texts in lines.items():
            along(group, texts, class_=ink_class, y=top + (row + _FILLED / 2) * step + 4)


def _mark_chosen(group: Element, cells: Heatmap) -> None:
    """Draw the outlines of the marked cells as one element, and their dots as one or two."""
    if not cells.chosen:
        return
    offset = px(_FILLED / 2 - 0.5)
    outlines = "".join(f"M{column} {row}h1v1h-1z" for row, column in cells.chosen)
    add(group, "path", class_="chosen", d=outlines, transform=f"translate({offset} {offset})")
    dots: dict[str, str] = defaultdict(str)
    for row, column in cells.chosen:
        dots[_look(cells, cells.values[row][column])[1]] += f"M{column} {row}h0"
    middle = px(_FILLED / 2)
    for ink_class, path in dots.items():
        add(group, "path", class_=f"dust {ink_class}", d=path, transform=f"translate({middle} {middle})")


def _look(cells: Heatmap, value: float) -> tuple[str, str]:
    """Return a value's shade, and the CSS class of text on it."""
    fill, ink = cividis(round(float(cells.scale.fraction(value)) * (SHADES - 1)) / (SHADES - 1))
    return fill, _ON[ink]


def svg(chart: Chart, kind: str, width: float, height: float) -> Element:
    """Return an ``svg`` element of a CSS class, with the chart's title and description for screen readers."""
    root = Element("svg", {"class": kind, "role": "img", "data-chart": chart.name})
    root.set("aria-labelledby", f"{chart.name}-t {chart.name}-d")
    root.set("viewBox", f"0 0 {px(width)} {px(height)}")
    add(root, "title", chart.title, id=f"{chart.name}-t")
    add(root, "desc", chart.words, id=f"{chart.name}-d")
    return root


def add(parent: Element, tag: str, text: str | None = None, **attributes: Any) -> Element:
    """Append a child element and return it: underscores in attributes become dashes, numbers are written as lengths."""
    child = ElementTree.SubElement(parent, tag)
    for key, value in attributes.items():
        child.set(key.rstrip("_").replace("_", "-"), value if isinstance(value, str) else px(value))
    child.text, child.tail = text, "\n"
    return child


def along(parent: Element, texts: Iterable[tuple[float, str]], **attributes: Any) -> None:
    """Append one ``text`` element with several texts, each at its own x; they share the attributes."""
    line = add(parent, "text", **attributes)
    for x, text in texts:
        add(line, "tspan", text, x=x).tail = None


def px(value: float) -> str:
    """Format a length in user units with one decimal, or two below 1."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 1 else f"{value:.1f}".removesuffix(".0")


def markup(element: Element) -> Markup:
    """Return the element as markup, with its texts escaped."""
    return Markup(ElementTree.tostring(element, encoding="unicode"))
