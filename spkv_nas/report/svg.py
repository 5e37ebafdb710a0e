"""Draw charts as inline SVG for the report page. Lengths are in SVG user units; colours are CSS classes of the page.

A mark with a tooltip refers to the page's data: ``data-mark="mark,index"``. Many dots that stand for layouts are one
element, which refers to its mark: ``data-cloud="mark"``. The page's script adds the tooltips of heatmap cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from markupsafe import Markup

from spkv_nas.artifacts.score_kind import Measure
from spkv_nas.report.chart import Axis, Band, Bars, Chart, Line, Points, Rule, legend_marks
from spkv_nas.report.colours import scale_stops
from spkv_nas.report.elements import add, along, markup, px, svg
from spkv_nas.report.labels import Label, chart_labels, margin
from spkv_nas.report.svg_maps import LEFT, draw_map

LETTER = 6.6  # average width of a label's letter
LINE = 15  # height of a label's line
_FOOT = 48  # from the axes to the bottom, for ticks and title
_GAP = 14.0  # above and to the right of the axes
_SCALE = 220.0  # length of a colour scale


@dataclass(frozen=True)
class Frame:
    """The position of a chart's axes."""

    chart: Chart
    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def of(cls, chart: Chart) -> Frame:
        """Return a frame with room for ticks, titles, and labels to the right."""
        ticks = LETTER * max((len(text) for _, text in chart.y.ticks), default=0)
        left = max(56.0, ticks + 28) if chart.y.title else min(150.0, ticks + 22)
        right = chart.width - max(_GAP + 2, margin(chart, LETTER))
        return cls(chart, left, _GAP, right, chart.height - _FOOT)

    def x(self, value: float) -> float:
        """Return the position of a value on the horizontal axis."""
        return self.left + self.chart.x.fraction(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the position of a value on the vertical axis."""
        return self.bottom + self.chart.y.fraction(value) * (self.top - self.bottom)

    def point(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a point."""
        return self.x(x), self.y(y)

    def labels(self) -> list[Label]:
        """Return every label of the chart."""
        box = (self.left, self.top, self.right, self.bottom)
        return chart_labels(self.chart, self.point, box, letter=LETTER, line=LINE)


def draw(chart: Chart) -> Markup:
    """Return the chart as an ``svg`` element."""
    if chart.heatmap is not None:
        return markup(draw_map(chart, chart.heatmap))
    frame = Frame.of(chart)
    # Axes
    root = svg(chart, "chart", chart.width, chart.height)
    _draw_axes(root, frame)
    # Marks behind the labels, clipped to the axes
    clip = add(root, "clipPath", id=f"{chart.name}-clip")
    add(
        clip,
        "rect",
        x=frame.left - 2,
        y=frame.top - 2,
        width=frame.right - frame.left + 4,
        height=frame.bottom - frame.top + 4,
    )
    inside = add(root, "g", clip_path=f"url(#{chart.name}-clip)")
    for number, mark in enumerate(chart.marks):
        match mark:
            case Band():
                _draw_band(inside, frame, mark)
            case Bars():
                _draw_bars(inside, frame, mark, number)
            case Line():
                _draw_line(inside, [frame.point(x, y) for x, y in zip(mark.x, mark.y, strict=True)], mark)
            case Rule():
                _draw_rule(inside, frame, mark)
            case _:
                pass
    # Leader lines, points, labels
    labels = frame.labels()
    for label in labels:
        if label.leader is not None:
            end = label.x + (3 if label.anchor == "end" else -3)
            add(root, "line", class_="leader", x1=label.leader[0], y1=label.leader[1], x2=end, y2=label.y)
    for number, mark in enumerate(chart.marks):
        if isinstance(mark, Points):
            _draw_points(root, frame, mark, number)
    for label in labels:
        add(root, "text", label.text, class_="label", x=label.x, y=label.y, dy=".35em", text_anchor=label.anchor)
    return markup(root)


def legend(chart: Chart) -> list[tuple[Markup, str]]:
    """Return (sample, name) of each entry of the legend."""
    entries = []
    for mark in legend_marks(chart):
        sample = Element("svg", {"width": "34", "height": "12", "aria-hidden": "true"})
        match mark:
            case Line():
                _draw_line(sample, [(0, 6), (34, 6)], mark)
            case Band():
                add(sample, "rect", class_=f"band tone-{mark.tone}", width=34, height=12, fill_opacity=mark.opacity)
            case Points():
                group = _group(sample, mark)
                _shape(group, mark, 17, 6, min(mark.size, 5))
        entries.append((markup(sample), mark.label))
    return entries


def draw_scale(measure: Measure) -> Markup:
    """Return the colour scale of a table's map."""
    scale, quantity = measure.scale, f"{measure.title}, {measure.shown}"
    root = Element("svg", {"class": "scale", "role": "img", "aria-labelledby": "scale-t"})
    add(root, "title", f"Colour scale: {quantity}", id="scale-t")
    width = LEFT + _SCALE + 24
    root.set("viewBox", f"0 0 {px(width)} 54")
    root.set("width", px(width))
    shades = add(add(root, "defs"), "linearGradient", id="cividis")
    for percent, fill in scale_stops():
        add(shades, "stop", offset=f"{percent}%", stop_color=fill)
    add(root, "rect", x=LEFT, y=4, width=_SCALE, height=12, rx=2, fill="url(#cividis)")
    ticks = [(LEFT + _SCALE * float(scale.fraction(value)), scale.text(value)) for value in scale.ticks]
    add(root, "path", class_="axis", d="".join(f"M{px(x)} 16v4" for x, _ in ticks))
    along(root, ticks, class_="tick", y=32, text_anchor="middle")
    add(root, "text", quantity, class_="tick", x=LEFT, y=49)
    return markup(root)


def _draw_axes(root: Element, frame: Frame) -> None:
    """Draw grid lines, ticks and titles."""
    chart, middle = frame.chart, (frame.left + frame.right) / 2
    for value, text in chart.y.ticks:
        kind = "zero" if value == 0 and chart.y.title else "gridline"
        add(root, "line", class_=kind, x1=frame.left, x2=frame.right, y1=frame.y(value), y2=frame.y(value))
        add(root, "text", text, class_="tick", x=frame.left - 8, y=frame.y(value), dy=".35em", text_anchor="end")
    _draw_ticks(root, frame, chart.x, frame.bottom)
    if chart.y.title:
        rotation = f"translate(13 {px((frame.top + frame.bottom) / 2)}) rotate(-90)"
        add(root, "text", chart.y.title, class_="title", transform=rotation, text_anchor="middle")
    add(root, "text", chart.x.title, class_="title", x=middle, y=frame.bottom + 38, text_anchor="middle")


def _draw_ticks(root: Element, frame: Frame, axis: Axis, y: float) -> None:
    """Draw a horizontal axis at ``y``, with ticks and texts below it."""
    add(root, "line", class_="axis", x1=frame.left, x2=frame.right, y1=y, y2=y)
    strokes = "".join(f"M{px(frame.x(value))} {px(y)}v4" for value, _ in axis.ticks)
    add(root, "path", class_="axis", d=strokes)
    texts = [(frame.x(value), text) for value, text in axis.ticks]
    along(root, texts, class_="tick", y=y + 18, text_anchor="middle")


def _draw_band(parent: Element, frame: Frame, band: Band) -> None:
    """Draw a band."""
    upper = [frame.point(x, y) for x, y in zip(band.x, band.high, strict=True)]
    lower = [frame.point(x, y) for x, y in zip(band.x, band.low, strict=True)]
    path = "M" + "L".join(f"{px(x)} {px(y)}" for x, y in [*upper, *reversed(lower)]) + "Z"
    add(parent, "path", class_=f"band tone-{band.tone}", d=path, fill_opacity=band.opacity)


def _draw_bars(parent: Element, frame: Frame, bars: Bars, number: int) -> None:
    """Draw bars; ``number`` is the mark's index in the page's data."""
    group = add(parent, "g", class_="bar tone-accent")
    for index, (low, high, height) in enumerate(zip(bars.low, bars.high, bars.height, strict=True)):
        left, top = frame.point(low, height)
        add(
            group,
            "rect",
            x=left + 1,
            y=top,
            width=frame.x(high) - left - 2,
            height=frame.y(0) - top,
            **_tip_reference(number, index, bars.tips),
        )


def _draw_line(parent: Element, vertices: Sequence[tuple[float, float]], line: Line) -> None:
    """Draw a line."""
    points = " ".join(f"{px(x)},{px(y)}" for x, y in vertices)
    opacity: dict[str, Any] = {} if line.opacity == 1 else {"stroke_opacity": line.opacity}
    add(
        parent,
        "polyline",
        class_=f"line tone-{line.tone} {line.dash}",
        points=points,
        stroke_width=line.width,
        **opacity,
    )


def _draw_rule(parent: Element, frame: Frame, rule: Rule) -> None:
    """Draw a line across the chart."""
    kind = f"rule tone-{rule.tone} {rule.dash}"
    if rule.vertical:
        x = frame.x(rule.value)
        add(parent, "line", class_=kind, x1=x, x2=x, y1=frame.top, y2=frame.bottom)
    else:
        y = frame.y(rule.value)
        add(parent, "line", class_=kind, x1=frame.left, x2=frame.right, y1=y, y2=y)


def _draw_points(parent: Element, frame: Frame, points: Points, number: int) -> None:
    """Draw points and their error bars; ``number`` is the mark's index in the page's data."""
    centres = [frame.point(x, y) for x, y in zip(points.x, points.y, strict=True)]
    bars = [
        f"M{px(x)} {px(frame.y(value + error))}V{px(frame.y(value - error))}"
        f"M{px(x - 4)} {px(frame.y(value + error))}h8M{px(x - 4)} {px(frame.y(value - error))}h8"
        for (x, _), value, error in zip(centres, points.y, points.error or (math.nan,) * len(centres), strict=True)
        if not math.isnan(error)
    ]
    if bars:
        add(parent, "path", class_=f"error tone-{points.tone}", d="".join(bars))
    if not points.tips and points.shape == "circle" and not points.hollow:  # one element for all of them
        dots = [(round(x), round(y)) for x, y in centres]
        reference = {"data_cloud": str(number)} if points.layouts else {}
        add(
            parent,
            "path",
            class_=f"dust tone-{points.tone}",
            d=_dust(dots if points.layouts else sorted(dots)),
            stroke_width=2 * points.size,
            stroke_opacity=points.opacity,
            **reference,
        )
        return
    group = _group(parent, points)
    for index, (x, y) in enumerate(centres):
        _shape(group, points, x, y, points.size, **_tip_reference(number, index, points.tips))


def _dust(dots: list[tuple[int, int]]) -> str:
    """Return a path of zero-length lines, each relative to the previous one, which is short if they are sorted."""
    path, (left, top) = "", (0, 0)
    for x, y in dots:
        path += f"m{x - left}{' ' if y >= top else ''}{y - top}z"
        left, top = x, y
    return path


def _group(parent: Element, points: Points) -> Element:
    """Add the group that sets the style of points."""
    kind = "stroke" if points.shape == "stroke" else "hollow" if points.hollow else "dot"
    if points.opacity == 1:
        return add(parent, "g", class_=f"{kind} tone-{points.tone}")
    return add(parent, "g", class_=f"{kind} faint tone-{points.tone}", fill_opacity=points.opacity)


def _shape(parent: Element, points: Points, x: float, y: float, size: float, **attributes: str) -> None:
    """Draw one point."""
    # Each shape has about the area of the circle, and its centre at (x, y)
    half_side = 1.1 * size
    match points.shape:
        case "circle":
            add(parent, "circle", cx=x, cy=y, r=size, **attributes)
        case "square":
            add(
                parent,
                "rect",
                x=x - half_side,
                y=y - half_side,
                width=2 * half_side,
                height=2 * half_side,
                **attributes,
            )
        case "diamond":
            step = px(1.5 * size)  # of each of its four lines, in x and in y
            add(
                parent,
                "path",
                d=f"M{px(x)} {px(y - 1.5 * size)}l{step} {step}-{step} {step}-{step}-{step}z",
                **attributes,
            )
        case "triangle":
            step, down = px(1.3 * size), px(2.3 * size)
            add(parent, "path", d=f"M{px(x)} {px(y - 1.3 * size)}l{step} {down}h-{px(2.6 * size)}z", **attributes)
        case "stroke":
            add(parent, "path", d=f"M{px(x)} {px(y - size)}v{px(2 * size)}", **attributes)


def _tip_reference(mark: int, index: int, tips: tuple[str, ...]) -> dict[str, str]:
    """Return the attribute that refers to a mark's tooltip in the page's data, if it has one."""
    return {"data_mark": f"{mark},{index}"} if tips else {}
