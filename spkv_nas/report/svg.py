"""A chart as inline SVG for the report's page. Lengths are SVG user units; colours are the page's classes.

A mark that has a tip says where in the page's data it stands: ``data-at="mark,index"``. Cells of heatmaps get
theirs from the page's script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from markupsafe import Markup

from spkv_nas.artifacts.measure import Measure
from spkv_nas.report.chart import Axis, Band, Bars, Chart, Heatmap, Line, Points, Rule, legend_marks
from spkv_nas.report.colours import cividis, scale_stops
from spkv_nas.report.labels import Label, chart_labels, margin

Cell = tuple[int, int]  # row, column
Place = tuple[float, float]  # of its upper left corner

LETTER = 6.6  # width of one letter of a label, on average
LINE = 15  # height of a label
_ON = {"#000": "on-light", "#fff": "on-dark"}  # class of what is written on a shade
_FOOT = 48  # from the axes to the bottom, for ticks and title
_GAP = 14.0  # above and to the right of the axes
_WIDEST_MAP = 1048  # what the page has room for
_MAP_LEFT = 58.0  # of its cells
_SCALE = 220.0  # length of a colour scale


@dataclass(frozen=True)
class Frame:
    """Where a chart's axes are."""

    chart: Chart
    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def of(cls, chart: Chart) -> Frame:
        """The frame that leaves room for ticks, titles, and labels to the right."""
        ticks = LETTER * max((len(text) for _, text in chart.y.ticks), default=0)
        left = max(56.0, ticks + 28) if chart.y.title else min(150.0, ticks + 22)
        right = chart.width - max(_GAP + 2, margin(chart, LETTER))
        return cls(chart, left, 46.0 if chart.above else _GAP, right, chart.height - _FOOT)

    def x(self, value: float) -> float:
        """Place of a value of the horizontal axis."""
        return self.left + self.chart.x.fraction(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Place of a value of the vertical axis."""
        return self.bottom + self.chart.y.fraction(value) * (self.top - self.bottom)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Place of a point."""
        return self.x(x), self.y(y)

    def labels(self) -> list[Label]:
        """Every label of the chart."""
        box = (self.left, self.top, self.right, self.bottom)
        return chart_labels(self.chart, self.at, box, letter=LETTER, line=LINE)


def draw(chart: Chart) -> Markup:
    """The chart as an ``svg`` element."""
    if chart.heatmap is not None:
        return _text(_draw_map(chart, chart.heatmap))
    frame = Frame.of(chart)
    root = _root(chart, "chart", "img", chart.width, chart.height)
    _draw_axes(root, frame)
    clip = _add(root, "clipPath", id=f"{chart.name}-clip")
    _add(clip, "rect", x=frame.left - 2, y=frame.top - 2, width=frame.right - frame.left + 4,
         height=frame.bottom - frame.top + 4)  # fmt: skip
    inside = _add(root, "g", clip_path=f"url(#{chart.name}-clip)")
    for number, mark in enumerate(chart.marks):
        match mark:
            case Band():
                _draw_band(inside, frame, mark)
            case Bars():
                _draw_bars(inside, frame, mark, number)
            case Line():
                _draw_line(inside, [frame.at(x, y) for x, y in zip(mark.x, mark.y, strict=True)], mark)
            case Rule():
                _draw_rule(inside, frame, mark)
            case _:
                pass
    labels = frame.labels()
    for label in labels:
        if label.leader is not None:
            end = label.x + (3 if label.anchor == "end" else -3)
            _add(root, "line", class_="leader", x1=label.leader[0], y1=label.leader[1], x2=end, y2=label.y)
    for number, mark in enumerate(chart.marks):
        if isinstance(mark, Points):
            _draw_points(root, frame, mark, number)
    for label in labels:
        _add(root, "text", label.text, class_="label", x=label.x, y=label.y, dy=".35em", text_anchor=label.anchor)
    return _text(root)


def legend(chart: Chart) -> list[tuple[Markup, str]]:
    """(sample, name) of what the legend names."""
    entries = []
    for mark in legend_marks(chart):
        sample = Element("svg", {"width": "34", "height": "12", "aria-hidden": "true"})
        match mark:
            case Line():
                _draw_line(sample, [(0, 6), (34, 6)], mark)
            case Band():
                _add(sample, "rect", class_=f"band tone-{mark.tone}", width=34, height=12, fill_opacity=mark.opacity)
            case Points():
                group = _group(sample, mark)
                _shape(group, mark, 17, 6, min(mark.size, 5))
        entries.append((_text(sample), mark.label))
    return entries


def draw_scale(measure: Measure) -> Markup:
    """The colours of a table's map, with their values."""
    scale, what = measure.scale, f"{measure.title}, {measure.shown}"
    root = Element("svg", {"class": "scale", "role": "img", "aria-labelledby": "scale-t"})
    _add(root, "title", f"Colour scale: {what}", id="scale-t")
    width = _MAP_LEFT + _SCALE + 24
    root.set("viewBox", f"0 0 {_px(width)} 54")
    root.set("width", _px(width))
    shades = _add(_add(root, "defs"), "linearGradient", id="cividis")
    for percent, fill in scale_stops():
        _add(shades, "stop", offset=f"{percent}%", stop_color=fill)
    _add(root, "rect", x=_MAP_LEFT, y=4, width=_SCALE, height=12, rx=2, fill="url(#cividis)")
    for value in scale.ticks:
        x = _MAP_LEFT + _SCALE * float(scale.fraction(value))
        _add(root, "line", class_="axis", x1=x, x2=x, y1=16, y2=20)
        _add(root, "text", scale.text(value), class_="tick", x=x, y=32, text_anchor="middle")
    _add(root, "text", what, class_="tick", x=_MAP_LEFT, y=49)
    return _text(root)


def _draw_axes(root: Element, frame: Frame) -> None:
    chart, middle = frame.chart, (frame.left + frame.right) / 2
    for value, text in chart.y.ticks:
        kind = "zero" if value == 0 and chart.y.title else "gridline"
        _add(root, "line", class_=kind, x1=frame.left, x2=frame.right, y1=frame.y(value), y2=frame.y(value))
        _add(root, "text", text, class_="tick", x=frame.left - 8, y=frame.y(value), dy=".35em", text_anchor="end")
    _draw_ticks(root, frame, chart.x, frame.bottom, 1)
    if chart.above is not None:
        _draw_ticks(root, frame, chart.above, frame.top, -1)
    if chart.y.title:
        turned = f"translate(13 {_px((frame.top + frame.bottom) / 2)}) rotate(-90)"
        _add(root, "text", chart.y.title, class_="title", transform=turned, text_anchor="middle")
    _add(root, "text", chart.x.title, class_="title", x=middle, y=frame.bottom + 38, text_anchor="middle")


def _draw_ticks(root: Element, frame: Frame, axis: Axis, y: float, down: int) -> None:
    """A horizontal axis at ``y``, its ticks and texts below it, or above with ``down`` -1."""
    _add(root, "line", class_="axis", x1=frame.left, x2=frame.right, y1=y, y2=y)
    for value, text in axis.ticks:
        x = frame.x(value)
        _add(root, "line", class_="axis", x1=x, x2=x, y1=y, y2=y + 4 * down)
        _add(root, "text", text, class_="tick", x=x, y=y + (18 if down == 1 else -9), text_anchor="middle")
    if down == -1:
        _add(root, "text", axis.title, class_="title", x=(frame.left + frame.right) / 2, y=y - 28, text_anchor="middle")


def _draw_band(parent: Element, frame: Frame, band: Band) -> None:
    upper = [frame.at(x, y) for x, y in zip(band.x, band.high, strict=True)]
    lower = [frame.at(x, y) for x, y in zip(band.x, band.low, strict=True)]
    path = "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y in [*upper, *reversed(lower)]) + "Z"
    _add(parent, "path", class_=f"band tone-{band.tone}", d=path, fill_opacity=band.opacity)


def _draw_bars(parent: Element, frame: Frame, bars: Bars, number: int) -> None:
    group = _add(parent, "g", class_="bar tone-accent")
    for index, (low, high, height) in enumerate(zip(bars.low, bars.high, bars.height, strict=True)):
        left, top = frame.at(low, height)
        _add(group, "rect", x=left + 1, y=top, width=frame.x(high) - left - 2, height=frame.y(0) - top,
             **_at(number, index, bars.tips))  # fmt: skip


def _draw_line(parent: Element, places: Sequence[tuple[float, float]], line: Line) -> None:
    points = " ".join(f"{_px(x)},{_px(y)}" for x, y in places)
    faint: dict[str, Any] = {} if line.opacity == 1 else {"stroke_opacity": line.opacity}
    _add(parent, "polyline", class_=f"line tone-{line.tone} {line.dash}", points=points, stroke_width=line.width,
         **faint)  # fmt: skip


def _draw_rule(parent: Element, frame: Frame, rule: Rule) -> None:
    kind = f"rule tone-{rule.tone} {rule.dash}"
    if rule.vertical:
        x = frame.x(rule.at)
        _add(parent, "line", class_=kind, x1=x, x2=x, y1=frame.top, y2=frame.bottom)
    else:
        y = frame.y(rule.at)
        _add(parent, "line", class_=kind, x1=frame.left, x2=frame.right, y1=y, y2=y)


def _draw_points(parent: Element, frame: Frame, points: Points, number: int) -> None:
    places = [frame.at(x, y) for x, y in zip(points.x, points.y, strict=True)]
    bars = [
        f"M{_px(x)} {_px(frame.y(value + error))}V{_px(frame.y(value - error))}"
        f"M{_px(x - 4)} {_px(frame.y(value + error))}h8M{_px(x - 4)} {_px(frame.y(value - error))}h8"
        for (x, _), value, error in zip(places, points.y, points.error or (math.nan,) * len(places), strict=True)
        if not math.isnan(error)
    ]
    if bars:
        _add(parent, "path", class_=f"error tone-{points.tone}", d="".join(bars))
    if not points.tips and points.shape == "circle" and not points.hollow:  # one element for all
        dots = "".join(f"M{_px(x)} {_px(y)}h0" for x, y in places)
        _add(parent, "path", class_=f"dust tone-{points.tone}", d=dots, stroke_width=2 * points.size,
             stroke_opacity=points.opacity)  # fmt: skip
        return
    group = _group(parent, points)
    for index, (x, y) in enumerate(places):
        _shape(group, points, x, y, points.size, **_at(number, index, points.tips))


def _group(parent: Element, points: Points) -> Element:
    kind = "stroke" if points.shape == "stroke" else "hollow" if points.hollow else "dot"
    if points.opacity == 1:
        return _add(parent, "g", class_=f"{kind} tone-{points.tone}")
    return _add(parent, "g", class_=f"{kind} faint tone-{points.tone}", fill_opacity=points.opacity)


def _shape(parent: Element, points: Points, x: float, y: float, size: float, **attributes: str) -> None:
    wide = 1.1 * size
    match points.shape:
        case "circle":
            _add(parent, "circle", cx=x, cy=y, r=size, **attributes)
        case "square":
            _add(parent, "rect", x=x - wide, y=y - wide, width=2 * wide, height=2 * wide, **attributes)
        case "diamond":
            step = _px(1.5 * size)
            _add(parent, "path", d=f"M{_px(x)} {_px(y - 1.5 * size)}l{step} {step}-{step} {step}-{step}-{step}z",
                 **attributes)  # fmt: skip
        case "triangle":
            step, down = _px(1.3 * size), _px(2.3 * size)
            _add(parent, "path", d=f"M{_px(x)} {_px(y - 1.3 * size)}l{step} {down}h-{_px(2.6 * size)}z", **attributes)
        case "stroke":
            _add(parent, "path", d=f"M{_px(x)} {_px(y - size)}v{_px(2 * size)}", **attributes)


def _draw_map(chart: Chart, cells: Heatmap) -> Element:
    columns, rows = len(cells.values[0]), len(cells.values)
    size = float(min(46, max(24, _WIDEST_MAP // columns - 2))) if cells.written else 14.0
    step = size + (2 if cells.written else 4)
    left, top = (_MAP_LEFT, 4.0) if cells.written else (20.0, 6.0)
    width, height = left + columns * step + 4, top + rows * step + (20 if cells.written else 18)
    root = _root(chart, "map" if cells.written else "small", "img", width, height)
    root.set("width", _px(width if cells.written else 1.4 * width))
    if cells.written:
        root.set("data-map", str(columns))
        root.set("height", _px(height))
    places = {
        (row, column): (left + column * step, top + row * step) for row in range(rows) for column in range(columns)
    }
    (_draw_cells if cells.written else _draw_small_cells)(root, cells, places, size)
    for value, text in chart.x.ticks:
        _add(root, "text", text, class_="tick", x=left + value * step + size / 2, y=height - 5, text_anchor="middle")
    for value, text in chart.y.ticks:
        _add(root, "text", text, class_="tick", x=left - 8 if cells.written else 14, y=top + value * step + size / 2,
             dy=".35em", text_anchor="end")  # fmt: skip
    return root


def _draw_cells(parent: Element, cells: Heatmap, places: Mapping[Cell, Place], size: float) -> None:
    """A group for every cell, row after row, which the page's script gives a label; empty ones have nothing in it."""
    for (row, column), (x, y) in places.items():
        group, value = _add(parent, "g"), cells.values[row][column]
        if math.isnan(value):
            continue
        fill, ink = cividis(float(cells.scale.fraction(value)))
        _add(group, "rect", x=x, y=y, width=size, height=size, fill=fill)
        _add(group, "text", cells.scale.text(value), class_=_ON[ink],
             x=x + size / 2, y=y + size / 2 + 4)  # fmt: skip


def _draw_small_cells(parent: Element, cells: Heatmap, places: Mapping[Cell, Place], size: float) -> None:
    """One element for all cells of a shade, of a hundred; one for all outlines, and one or two for the dots in them."""
    shades: dict[str, str] = {}
    dots: dict[str, str] = {}
    outlines = ""
    for (row, column), (x, y) in places.items():
        if math.isnan(value := cells.values[row][column]):
            continue
        fill, ink = cividis(round(float(cells.scale.fraction(value)), 2))
        on = _ON[ink]
        shades[fill] = f"{shades.get(fill, '')}M{_px(x)} {_px(y)}{_square(size)}"
        if (row, column) in cells.chosen:
            outlines += f"M{_px(x - 1)} {_px(y - 1)}{_square(size + 2)}"
            dots[on] = f"{dots.get(on, '')}M{_px(x + size / 2)} {_px(y + size / 2)}h0"
    for fill, path in shades.items():
        _add(parent, "path", d=path, fill=fill)
    if outlines:
        _add(parent, "path", class_="chosen", d=outlines)
    for on, path in dots.items():
        _add(parent, "path", class_=f"dust {on}", d=path)


def _square(size: float) -> str:
    """A path around a square, from its upper left corner."""
    return f"h{_px(size)}v{_px(size)}h{_px(-size)}z"


def _root(chart: Chart, kind: str, role: str, width: float, height: float) -> Element:
    """An ``svg`` element with the chart's title and description for who cannot see it."""
    root = Element("svg", {"class": kind, "role": role, "data-chart": chart.name})
    root.set("aria-labelledby", f"{chart.name}-t {chart.name}-d")
    root.set("viewBox", f"0 0 {_px(width)} {_px(height)}")
    _add(root, "title", chart.title, id=f"{chart.name}-t")
    _add(root, "desc", chart.description, id=f"{chart.name}-d")
    return root


def _at(mark: int, index: int, tips: tuple[str, ...]) -> dict[str, str]:
    """Where a mark's tip stands in the page's data, if it has one."""
    return {"data_at": f"{mark},{index}"} if tips else {}


def _add(parent: Element, tag: str, text: str | None = None, **attributes: Any) -> Element:
    """A child element, on a line of its own; underscores in attributes stand for dashes, numbers are lengths."""
    child = ElementTree.SubElement(parent, tag)
    for key, value in attributes.items():
        child.set(key.rstrip("_").replace("_", "-"), value if isinstance(value, str) else _px(value))
    child.text, child.tail = text, "\n"
    return child


def _px(value: float) -> str:
    """A length in user units, to a tenth, or below 1 to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 1 else f"{value:.1f}".removesuffix(".0")


def _text(element: Element) -> Markup:
    """The element as markup: escaped, so that no text in it acts."""
    return Markup(ElementTree.tostring(element, encoding="unicode"))
