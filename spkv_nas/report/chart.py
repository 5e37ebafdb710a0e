"""A chart in data coordinates: its axes, its marks, and what there is to say about it.

Knows neither SVG nor matplotlib: ``svg`` draws a chart on the report's page, ``plot`` as a picture beside it, and
``data`` hands the page its numbers. Lengths (sizes, widths of lines) are user units of the page, 62.5 to the inch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from spkv_nas.artifacts.score_kind import PERCENT, Scale

Tone = Literal["accent", "muted", "second", "third", "ink"]
Dash = Literal["solid", "dashed", "dashdot", "dotted"]
Shape = Literal["circle", "square", "diamond", "triangle", "stroke"]
Numbers = tuple[float, ...]

SERIES: tuple[tuple[Tone, Dash], ...] = (
    ("accent", "solid"), ("muted", "dashed"), ("second", "dashdot"), ("third", "dotted")
)  # fmt: skip  # of lines in one chart, told apart without their colour


@dataclass(frozen=True)
class Axis:
    """A scale from ``low`` (left or bottom) to ``high``, which may be the smaller; ``ticks`` are (value, text)."""

    title: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def fraction(self, value: float) -> float:
        """Return where a value lies: 0 at ``low``, 1 at ``high``.

        On a logarithmic axis what lies below ``low``, such as the lower end of a wide error bar, is drawn at ``low``.
        """
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Line:
    """A line through points in order; ``label`` is its name in the legend, if it has one."""

    x: Numbers
    y: Numbers
    label: str = ""
    tone: Tone = "accent"
    dash: Dash = "solid"
    width: float = 2.4
    opacity: float = 1.0


@dataclass(frozen=True)
class Band:
    """What lies between two lines, shaded."""

    x: Numbers
    low: Numbers
    high: Numbers
    label: str = ""
    tone: Tone = "accent"
    opacity: float = 0.18


@dataclass(frozen=True)
class Points:
    """Marks at (x, y).

    Attributes:
        error: half the length of each vertical error bar; NaN for none; empty: no point has one.
        tips: what pointing at each shows; empty: nothing.
        names: texts beside them, "" for none; empty: no point has one.
        form: what all tips share, around each of their words, which stand in ``tips`` alone; empty: they share nothing.
        layouts: names of the layouts that points without tips stand for, which the page then shows; empty: none.
        farthest: lines of text that a name may move from its point.
        optional: whether a name without room is left out.
        size: radius.
        hollow: whether only the outline is drawn.
    """

    x: Numbers
    y: Numbers
    error: Numbers = ()
    tips: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    form: tuple[str, ...] = ()
    farthest: int = 8
    optional: bool = False
    label: str = ""
    shape: Shape = "circle"
    tone: Tone = "accent"
    size: float = 5.0
    opacity: float = 1.0
    hollow: bool = False


@dataclass(frozen=True)
class Bars:
    """Bars from 0 to ``height``, each over [low, high] of the horizontal axis."""

    low: Numbers
    high: Numbers
    height: Numbers
    tips: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A line across the chart at a value: of the horizontal axis if ``vertical``, else of the vertical one."""

    at: float
    label: str = ""
    vertical: bool = True
    tone: Tone = "ink"
    dash: Dash = "dashed"


@dataclass(frozen=True)
class Heatmap:
    """Cells in cividis, row 0 at the top; a cell's centre is at (column, row) of the axes.

    Attributes:
        values: by row; NaN is an empty cell.
        words: what pointing at a cell says on the page, where ``%`` stands for its value in percent; "": nothing.
        chosen: (row, column) of the cells marked by an outline and a dot.
        written: whether cells are large and show their value.
        scale: of the colours, and of values as they are written.
        legend: what the colours mean, for a scale beside a picture; "" for none.
        same_as: name of a chart on the same page that has the same values, whose cells are shown; "": its own.
    """

    values: tuple[Numbers, ...]
    words: str = ""
    chosen: tuple[tuple[int, int], ...] = ()
    written: bool = True
    scale: Scale = PERCENT
    legend: str = ""
    same_as: str = ""


Mark = Line | Band | Points | Bars | Rule | Heatmap


@dataclass(frozen=True)
class Chart:
    """One pair of axes with marks, drawn in their order.

    Attributes:
        name: of its files, and its id on the page.
        title: what the page says above it.
        description: what there is to see, in words.
        note: what the page says below it.
        heading: what is said above it in a picture, where a title of the page would not do.
        above: a second horizontal axis, in the values of the first, along the top.
    """

    name: str
    title: str
    description: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    note: str = ""
    heading: str = ""
    above: Axis | None = None
    width: float = 400.0
    height: float = 280.0

    @property
    def heatmap(self) -> Heatmap | None:
        """Its cells, if it is a heatmap; it then has no other marks."""
        return next((mark for mark in self.marks if isinstance(mark, Heatmap)), None)


@dataclass(frozen=True)
class Panels:
    """Charts that share one picture, row after row."""

    name: str
    charts: tuple[Chart, ...]
    columns: int = 2


def legend_marks(chart: Chart) -> list[Line | Band | Points]:
    """The marks that the legend names, lines first."""
    named = [mark for mark in chart.marks if isinstance(mark, Line | Band | Points) and mark.label]
    return sorted(named, key=lambda mark: (Line, Points, Band).index(type(mark)))


def numbers(values: Iterable[float], scale: float = 1.0) -> Numbers:
    """Values, such as a column of a table, times ``scale``."""
    return tuple(scale * float(value) for value in values)


def thinned(x: Numbers, y: Numbers, near: float) -> tuple[Numbers, Numbers]:
    """A line from fewer points, nowhere farther than ``near`` in y from the one through all (Douglas and Peucker)."""
    kept, open_ = {0, len(x) - 1}, [(0, len(x) - 1)]
    while open_:
        first, last = open_.pop()
        off = [
            abs(y[at] - y[first] - (y[last] - y[first]) * (x[at] - x[first]) / (x[last] - x[first]))
            for at in range(first + 1, last)
        ]
        if max(off, default=0.0) > near:
            middle = first + 1 + off.index(max(off))
            kept.add(middle)
            open_ += [(first, middle), (middle, last)]
    return tuple(x[at] for at in sorted(kept)), tuple(y[at] for at in sorted(kept))
