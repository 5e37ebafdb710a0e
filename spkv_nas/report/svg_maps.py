"""Heatmaps as inline SVG for the report's page: large ones with their values, small ones with a layout's heads marked.

Cells are one element for every shade, in units of a cell, so that a map of thousands is short; small maps that show the
same values take the cells of the large one. The page's script lays things over the cells that can be pointed at.
"""

from __future__ import annotations

import math
from collections import defaultdict
from xml.etree.ElementTree import Element

from spkv_nas.report.chart import Chart, Heatmap
from spkv_nas.report.colours import SHADES, cividis
from spkv_nas.report.elements import add, along, px, svg

LEFT = 58.0  # of a large map's cells, to its left edge
_WIDEST = 1048  # what the page has room for
_FILLED = 0.92  # of a cell's width and height
_ON = {"#000": "on-light", "#fff": "on-dark"}  # class of what is written on a shade


def draw_map(chart: Chart, cells: Heatmap) -> Element:
    """A chart's cells with the names of rows and columns."""
    columns, rows = len(cells.values[0]), len(cells.values)
    step = float(min(48, max(26, _WIDEST // columns))) if cells.written else 18.0
    left, top = (LEFT, 4.0) if cells.written else (20.0 if chart.y.ticks else 0.0, 6.0)
    foot = 20 if cells.written else 18 if chart.x.ticks else 4
    width, height = left + columns * step + 4, top + rows * step + foot
    drawn = svg(chart, "map" if cells.written else "small", width, height)
    drawn.set("width", px(width if cells.written else 1.4 * width))
    group = add(drawn, "g", class_="cells", transform=f"translate({px(left)} {px(top)}) scale({px(step)})")
    if cells.same_as:
        add(group, "use", href=f"#{cells.same_as}-cells")
    else:
        _draw_cells(add(group, "g", id=f"{chart.name}-cells"), cells)
    if cells.written:
        drawn.set("data-map", f"{columns} {px(step)} {px(left)} {px(top)}")
        drawn.set("height", px(height))
        _write_values(add(drawn, "g", class_="values"), cells, step, left, top)
    else:
        _mark_chosen(group, cells)
    columns_at = [(left + (value + _FILLED / 2) * step, text) for value, text in chart.x.ticks]
    along(drawn, columns_at, class_="tick", y=height - 5, text_anchor="middle")
    for value, text in chart.y.ticks:
        y = top + (value + _FILLED / 2) * step
        add(drawn, "text", text, class_="tick", x=left - 8 if cells.written else 14, y=y, dy=".35em", text_anchor="end")
    return drawn


def _draw_cells(group: Element, cells: Heatmap) -> None:
    """Short thick lines, of which each is a cell; empty ones are left out."""
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
    for row, values in enumerate(cells.values):
        lines: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for column, value in enumerate(values):
            if not math.isnan(value):
                at = left + round((column + _FILLED / 2) * step)
                lines[_look(cells, value)[1]].append((at, cells.scale.text(value)))
        for on, texts in lines.items():
            along(group, texts, class_=on, y=top + (row + _FILLED / 2) * step + 4)


def _mark_chosen(group: Element, cells: Heatmap) -> None:
    """One element for all outlines, and one or two for the dots in them."""
    if not cells.chosen:
        return
    around = px(_FILLED / 2 - 0.5)
    outlines = "".join(f"M{column} {row}h1v1h-1z" for row, column in cells.chosen)
    add(group, "path", class_="chosen", d=outlines, transform=f"translate({around} {around})")
    dots: dict[str, str] = defaultdict(str)
    for row, column in cells.chosen:
        dots[_look(cells, cells.values[row][column])[1]] += f"M{column} {row}h0"
    middle = px(_FILLED / 2)
    for on, path in dots.items():
        add(group, "path", class_=f"dust {on}", d=path, transform=f"translate({middle} {middle})")


def _look(cells: Heatmap, value: float) -> tuple[str, str]:
    """A value's shade, and the class of what is written on it."""
    fill, ink = cividis(round(float(cells.scale.fraction(value)) * (SHADES - 1)) / (SHADES - 1))
    return fill, _ON[ink]
