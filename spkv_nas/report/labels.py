"""Point a chart's labels, both for the page and for picture files.

Lengths are in the unit of the renderer, y downward. Labels avoid marks, lines and other labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spkv_nas.report.chart import Bars, Chart, Line, Points, Rule

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom
_FAINT = 0.6  # labels may cover marks of lower opacity
_MARGIN = 14  # from the end of a line across the chart to its label


@dataclass(frozen=True)
class Label:
    """A text, centred vertically on y.

    Attributes:
        x: left, middle or right of the text, by ``anchor``.
        y: vertical centre.
        text: what it says.
        anchor: as in SVG.
        leader: point from which a thin line leads to a label that had to move away from its mark.
    """

    x: float
    y: float
    text: str
    anchor: str = "start"
    leader: Point | None = None


def margin(chart: Chart, letter: float) -> float:
    """Return the width that labels need to the right of the axes; ``letter`` is a letter's width."""
    names = [mark.label for mark in _across(chart)]
    return _MARGIN + letter * max(map(len, names)) if names else 0.0


def chart_labels(
    chart: Chart, project: Callable[[float, float], Point], box: Box, *, letter: float, line: float
) -> list[Label]:
    """Return every label inside and beside a chart's axes.

    Args:
        chart: the chart.
        project: maps data coordinates to the renderer's.
        box: extent of the axes.
        letter: average width of a letter.
        line: height of a line of text.
    """
    # Labels of horizontal rules, to the right of the axes
    occupied = list(_obstacles(chart, project, box))
    labels = _beside_axes([(project(chart.x.high, mark.value)[1], mark.label) for mark in _across(chart)], box, line)
    # Labels of vertical rules
    for mark in chart.marks:
        if isinstance(mark, Rule) and mark.vertical and mark.label:
            labels.append(_along_rule(project(mark.value, chart.y.low)[0], mark.label, box, occupied, letter, line))
    # Names of points
    for mark in chart.marks:
        if not isinstance(mark, Points) or not any(mark.names):
            continue
        positions = [project(x, y) for x, y in zip(mark.x, mark.y, strict=True)]
        if mark.shape == "stroke":
            labels += [
                Label(x, y - mark.size - line / 2, name, "middle")
                for (x, y), name in zip(positions, mark.names, strict=True)
            ]
        else:
            labels += place_labels(
                positions,
                mark.names,
                box,
                occupied=occupied,
                letter=letter,
                line=line,
                farthest=mark.farthest,
                optional=mark.optional,
            )
    return labels


def place_labels(
    marks: Sequence[Point],
    names: Sequence[str],
    within: Box,
    *,
    occupied: list[Box],
    letter: float,
    line: float,
    farthest: int = 8,
    optional: bool = False,
) -> list[Label]:
    """Point names beside their marks, each at the nearest free position (greedy).

    Args:
        marks: position of each mark.
        names: text of each, "" for none.
        within: box that the labels should stay in.
        occupied: occupied boxes; those of the new labels are appended.
        letter: average width of a letter.
        line: height of a line of text.
        farthest: lines by which a label may move up or down.
        optional: leave out a label that finds no free position; otherwise it keeps its first one.
    """
    labels = []
    for (x, y), name in zip(marks, names, strict=True):
        if not name:
            continue
        # Candidates: right or left of the mark, moved by whole lines
        boxes = [
            (left, y + shift - line / 2, left + letter * len(name), y + shift + line / 2)
            for shift in (0.0, *(sign * k * line for k in range(1, farthest + 1) for sign in (-1, 1)))
            for left in (x + 10, x - 10 - letter * len(name))
        ]
        inside = [box for box in boxes if _holds(within, box)] or boxes[:1]
        box = _first_free(inside, occupied) or (None if optional else inside[0])
        if box is None:
            continue
        # Add a leader line if the label has moved
        occupied.append(box)
        middle = (box[1] + box[3]) / 2
        leader = (x, y) if abs(middle - y) > line * 0.6 else None
        right = box[0] > x
        labels.append(Label(box[0] if right else box[2], middle, name, "start" if right else "end", leader))
    return labels


def _beside_axes(rules: list[tuple[float, str]], box: Box, line: float) -> list[Label]:
    """Point the labels of horizontal rules to the right of the axes, as near their heights as they fit."""
    ordered = sorted(rules)
    heights = spread([height for height, _ in ordered], line)
    return [
        Label(box[2] + _MARGIN, height, name, "start", (box[2], rule_height))
        for (rule_height, name), height in zip(ordered, heights, strict=True)
    ]


def spread(targets: Sequence[float], gap: float) -> list[float]:
    """Return positions at least ``gap`` apart, nearest in squares to the ``targets`` ones; both ascend (isotonic)."""
    blocks: list[tuple[float, int]] = []
    for index, position in enumerate(targets):
        total, count = position - index * gap, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            block_total, block_count = blocks.pop()
            total, count = total + block_total, count + block_count
        blocks.append((total, count))
    means = [total / count for total, count in blocks for _ in range(count)]
    return [mean + index * gap for index, mean in enumerate(means)]


def _along_rule(x: float, name: str, box: Box, occupied: list[Box], letter: float, line: float) -> Label:
    """Point the label of a vertical line at the highest free position beside it."""
    width = letter * len(name)
    rows = [box[1] + row * line / 2 for row in range(int((box[3] - box[1]) / line * 2) - 1)]
    boxes = [(left, top, left + width, top + line) for top in rows for left in (x + 6, x - 6 - width)]
    inside = [candidate for candidate in boxes if _holds(box, candidate)] or boxes
    chosen = _first_free(inside, occupied) or inside[0]
    occupied.append(chosen)
    return Label(chosen[0], chosen[1] + line / 2, name)


def _obstacles(chart: Chart, project: Callable[[float, float], Point], box: Box) -> Iterator[Box]:
    """Yield the boxes of marks that labels should avoid."""
    for mark in chart.marks:
        match mark:
            case Line():
                yield from _along([project(x, y) for x, y in zip(mark.x, mark.y, strict=True)])
            case Points() if mark.opacity > _FAINT:
                errors = mark.error or (math.nan,) * len(mark.x)
                for x, y, error in zip(mark.x, mark.y, errors, strict=True):
                    (left, middle), high = project(x, y), project(x, y if math.isnan(error) else y + error)[1]
                    reach = max(7.0, middle - high)
                    yield left - 7, middle - reach, left + 7, middle + reach
            case Bars():
                for low, high, height in zip(mark.low, mark.high, mark.height, strict=True):
                    (left, bottom), (right, top) = project(low, 0.0), project(high, height)
                    yield left, top, right, bottom
            case Rule():
                x, y = project(mark.value, chart.y.low)[0], project(chart.x.low, mark.value)[1]
                yield (x - 2, box[1], x + 2, box[3]) if mark.vertical else (box[0], y - 2, box[2], y + 2)
            case _:
                pass


def _along(positions: list[Point]) -> Iterator[Box]:
    """Yield small boxes along the line through ``positions``."""
    for (x0, y0), (x1, y1) in pairwise(positions):
        steps = 1 + int(math.hypot(x1 - x0, y1 - y0) / 4)
        for k in range(steps + 1):
            x, y = x0 + (x1 - x0) * k / steps, y0 + (y1 - y0) * k / steps
            yield x - 1.5, y - 1.5, x + 1.5, y + 1.5


def _across(chart: Chart) -> list[Rule]:
    """Return the horizontal rules that have a label."""
    return [mark for mark in chart.marks if isinstance(mark, Rule) and not mark.vertical and mark.label]


def _first_free(boxes: Sequence[Box], occupied: Sequence[Box]) -> Box | None:
    """Return the first box that overlaps none of the occupied ones; None if there is none."""
    return next((box for box in boxes if not any(_overlap(box, other) for other in occupied)), None)


def _holds(outer: Box, inner: Box) -> bool:
    """Return True if ``outer`` contains ``inner``."""
    return outer[0] <= inner[0] and outer[1] <= inner[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


def _overlap(first: Box, second: Box) -> bool:
    """Return True if two boxes overlap."""
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]
