"""Where a chart's labels go: the same for the page and for pictures, in whatever unit the renderer draws.

Lengths are in that unit, y downward. A label keeps off marks, lines and other labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spkv_nas.report.chart import Bars, Chart, Line, Points, Rule

Place = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom
_FAINT = 0.6  # marks of less opacity may lie under a label
_MARGIN = 14  # from the end of a line across the chart to its label


@dataclass(frozen=True)
class Label:
    """A text, centred on y; ``leader`` is where a thin line leads from it, when it had to move away from its mark."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    leader: Place | None = None


def margin(chart: Chart, letter: float) -> float:
    """Room that labels need to the right of the axes; ``letter`` is the width of a letter."""
    names = [mark.label for mark in _across(chart)]
    return _MARGIN + letter * max(map(len, names)) if names else 0.0


def chart_labels(
    chart: Chart, at: Callable[[float, float], Place], box: Box, *, letter: float, line: float
) -> list[Label]:
    """Every label inside and beside a chart's axes.

    Args:
        at: the place of a point in data coordinates.
        box: of the axes.
        letter: width of a letter, on average.
        line: height of a line of text.
    """
    taken = list(_obstacles(chart, at, box))
    labels = _beside_axes([(at(chart.x.high, mark.at)[1], mark.label) for mark in _across(chart)], box, line)
    for mark in chart.marks:
        if isinstance(mark, Rule) and mark.vertical and mark.label:
            labels.append(_along_rule(at(mark.at, chart.y.low)[0], mark.label, box, taken, letter, line))
    for mark in chart.marks:
        if not isinstance(mark, Points) or not any(mark.names):
            continue
        places = [at(x, y) for x, y in zip(mark.x, mark.y, strict=True)]
        if mark.shape == "stroke":
            labels += [
                Label(x, y - mark.size - line / 2, name, "middle")
                for (x, y), name in zip(places, mark.names, strict=True)
            ]
        else:
            labels += place_labels(places, mark.names, box, taken=taken, letter=letter, line=line,
                                   farthest=mark.farthest, optional=mark.optional)  # fmt: skip
    return labels


def place_labels(
    marks: Sequence[Place],
    names: Sequence[str],
    within: Box,
    *,
    taken: list[Box],
    letter: float,
    line: float,
    farthest: int = 8,
    optional: bool = False,
) -> list[Label]:
    """Labels beside their marks that cover nothing in ``taken``, which grows by them: the nearest free place, greedily.

    A label moves at most ``farthest`` lines. One that finds no free place keeps its first, or if ``optional`` is left
    out.
    """
    labels = []
    for (x, y), name in zip(marks, names, strict=True):
        if not name:
            continue
        boxes = [
            (left, y + shift - line / 2, left + letter * len(name), y + shift + line / 2)
            for shift in (0.0, *(sign * k * line for k in range(1, farthest + 1) for sign in (-1, 1)))
            for left in (x + 10, x - 10 - letter * len(name))
        ]
        inside = [box for box in boxes if _holds(within, box)] or boxes[:1]
        box = _first_free(inside, taken) or (None if optional else inside[0])
        if box is None:
            continue
        taken.append(box)
        middle = (box[1] + box[3]) / 2
        moved = (x, y) if abs(middle - y) > line * 0.6 else None
        right = box[0] > x
        labels.append(Label(box[0] if right else box[2], middle, name, "start" if right else "end", moved))
    return labels


def _beside_axes(rules: list[tuple[float, str]], box: Box, line: float) -> list[Label]:
    """Labels to the right of the axes, each as near its height as the others leave room."""
    ordered = sorted(rules)
    heights = spread([height for height, _ in ordered], line)
    return [
        Label(box[2] + _MARGIN, height, name, "start", (box[2], wanted))
        for (wanted, name), height in zip(ordered, heights, strict=True)
    ]


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending places at least ``gap`` apart, nearest to the ascending ``wanted`` in the sum of squares."""
    blocks: list[tuple[float, int]] = []
    for index, place in enumerate(wanted):
        total, count = place - index * gap, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            more, others = blocks.pop()
            total, count = total + more, count + others
        blocks.append((total, count))
    means = [total / count for total, count in blocks for _ in range(count)]
    return [mean + index * gap for index, mean in enumerate(means)]


def _along_rule(x: float, name: str, box: Box, taken: list[Box], letter: float, line: float) -> Label:
    """The highest free place beside a vertical line."""
    width = letter * len(name)
    rows = [box[1] + row * line / 2 for row in range(int((box[3] - box[1]) / line * 2) - 1)]
    boxes = [(left, top, left + width, top + line) for top in rows for left in (x + 6, x - 6 - width)]
    inside = [place for place in boxes if _holds(box, place)] or boxes
    chosen = _first_free(inside, taken) or inside[0]
    taken.append(chosen)
    return Label(chosen[0], chosen[1] + line / 2, name)


def _obstacles(chart: Chart, at: Callable[[float, float], Place], box: Box) -> Iterator[Box]:
    """What labels keep off."""
    for mark in chart.marks:
        match mark:
            case Line():
                yield from _along([at(x, y) for x, y in zip(mark.x, mark.y, strict=True)])
            case Points() if mark.opacity > _FAINT:
                errors = mark.error or (math.nan,) * len(mark.x)
                for x, y, error in zip(mark.x, mark.y, errors, strict=True):
                    (left, middle), high = at(x, y), at(x, y if math.isnan(error) else y + error)[1]
                    reach = max(7.0, middle - high)
                    yield left - 7, middle - reach, left + 7, middle + reach
            case Bars():
                for low, high, height in zip(mark.low, mark.high, mark.height, strict=True):
                    (left, bottom), (right, top) = at(low, 0.0), at(high, height)
                    yield left, top, right, bottom
            case Rule():
                x, y = at(mark.at, chart.y.low)[0], at(chart.x.low, mark.at)[1]
                yield (x - 2, box[1], x + 2, box[3]) if mark.vertical else (box[0], y - 2, box[2], y + 2)
            case _:
                pass


def _along(places: list[Place]) -> Iterator[Box]:
    """Small boxes along the line through ``places``."""
    for (x0, y0), (x1, y1) in pairwise(places):
        steps = 1 + int(math.hypot(x1 - x0, y1 - y0) / 4)
        for k in range(steps + 1):
            x, y = x0 + (x1 - x0) * k / steps, y0 + (y1 - y0) * k / steps
            yield x - 1.5, y - 1.5, x + 1.5, y + 1.5


def _across(chart: Chart) -> list[Rule]:
    return [mark for mark in chart.marks if isinstance(mark, Rule) and not mark.vertical and mark.label]


def _first_free(boxes: Sequence[Box], taken: Sequence[Box]) -> Box | None:
    return next((box for box in boxes if not any(_overlap(box, other) for other in taken)), None)


def _holds(outer: Box, inner: Box) -> bool:
    return outer[0] <= inner[0] and outer[1] <= inner[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
