"""Describe a chart and its axes without matplotlib, in data coordinates and points, for ``plot`` and ``page_svg``."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from spkv_nas.artifacts.score_kind import PERCENT, Scale

Tone = Literal["accent", "muted", "second", "third", "ink"]
Dash = Literal["solid", "dashed", "dashdot", "dotted"]
Shape = Literal["circle", "square", "diamond", "triangle", "stroke"]
Numbers = tuple[float, ...]
_MAX_DESCRIBED = 40  # points in a description; a listener to more would lose the thread
# The page has variables of these names, for light and dark mode
TONES: dict[Tone | Literal["line"], str] = {
    "accent": "#1f5fa8",
    "muted": "#566173",
    "second": "#b05a00",
    "third": "#2e7d4f",
    "ink": "#1b2330",
    "line": "#dde1e8",  # of a grid
}
# Of the lines in one chart, distinguishable without colour
SERIES: tuple[tuple[Tone, Dash], ...] = (
    ("accent", "solid"),
    ("muted", "dashed"),
    ("second", "dashdot"),
    ("third", "dotted"),
)
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # between ticks, in powers of ten
_ROOM = 0.3  # greatest padding beyond the data, as a share of the tick step
_WIDE = 10.0  # ratio of the largest to the smallest value from which an axis is logarithmic
_BEYOND = 1.15  # padding of a logarithmic axis on either side, as a ratio
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """An axis of a chart."""

    title: str  # its label
    low: float  # value at the left or bottom
    high: float  # value at the right or top; it may be smaller than ``low``
    ticks: tuple[tuple[float, str], ...]  # (value, text) of each tick
    log: bool = False  # logarithmic instead of linear


@dataclass(frozen=True)
class Line:
    """A line through points in order; ``label`` is its name in the legend, "" for none."""

    x: Numbers
    y: Numbers
    label: str = ""
    tone: Tone = "accent"
    dash: Dash = "solid"
    width: float = 2.4
    opacity: float = 1.0


@dataclass(frozen=True)
class Band:
    """A shaded band between two lines."""

    x: Numbers
    low: Numbers
    high: Numbers
    label: str = ""
    tone: Tone = "accent"
    opacity: float = 0.18


@dataclass(frozen=True)
class Points:
    """Marks at (x, y)."""

    x: Numbers  # horizontal coordinates
    y: Numbers  # vertical coordinates
    # half the length of each vertical error bar; NaN for none; empty if no point has one
    error: Numbers = ()
    tips: tuple[str, ...] = ()  # tooltip of each point; empty if there are none
    # text beside each point where there is room, "" for none; empty if no point has one
    names: tuple[str, ...] = ()
    # names of the layouts that points without tips stand for, which the page then shows; empty for none
    layouts: tuple[str, ...] = ()
    label: str = ""  # name in the legend, "" for none
    shape: Shape = "circle"
    tone: Tone = "accent"
    size: float = 5.0  # radius
    opacity: float = 1.0
    hollow: bool = False  # draw the outline only


@dataclass(frozen=True)
class Bars:
    """Bars from 0 to ``height``, each over [low, high] of the horizontal axis."""

    low: Numbers
    high: Numbers
    height: Numbers
    tips: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A straight line across the whole chart."""

    value: float  # its position, on the horizontal axis if ``vertical``, else on the vertical one
    label: str = ""  # text beside it, "" for none
    vertical: bool = True  # direction of the line
    tone: Tone = "ink"
    dash: Dash = "dashed"


@dataclass(frozen=True)
class Heatmap:
    """Cells in the cividis colours, row 0 at the top; a cell's centre is at (column, row) of the axes."""

    values: tuple[Numbers, ...]  # values by row; NaN is an empty cell
    # tooltip of a cell on the page, in which ``%`` stands for its value in percent; "" for none
    words: str = ""
    # (row, column) of the cells that are marked with an outline and a dot
    chosen: tuple[tuple[int, int], ...] = ()
    written: bool = True  # draw large cells with their values in them
    # by row: what small cells have in them, a letter or a space; empty for nothing
    letters: tuple[str, ...] = ()
    scale: Scale = PERCENT  # colour scale, which also formats the values
    legend: str = ""  # title of the colour bar in pictures; "" for none
    # name of a chart on the page with the same values, whose cells are reused; "" for its own
    same_as: str = ""


Mark = Line | Band | Points | Bars | Rule | Heatmap


@dataclass(frozen=True)
class Chart:
    """One pair of axes with marks, drawn in order."""

    name: str  # the chart's file name, and its id on the page
    title: str  # heading on the page
    x: Axis  # horizontal axis
    y: Axis  # vertical axis
    marks: tuple[Mark, ...]  # what is drawn, back to front
    description: str = ""  # what the chart shows, in words, for screen readers; "": its tooltips
    note: str = ""  # text below it on the page
    heading: str = ""  # title in a picture file; "" for none
    width: float = 400.0  # width on the page
    height: float = 280.0  # height on the page

    @property
    def words(self) -> str:
        """Return what the chart shows, in words, by ``_MAX_DESCRIBED`` points."""
        if self.description:
            return self.description
        tips = []
        for mark in self.marks:
            if isinstance(mark, Points | Bars):
                tips += [tip.replace("\n", ", ") for tip in mark.tips]
        text = "; ".join(tips[:_MAX_DESCRIBED])
        if len(tips) > _MAX_DESCRIBED:
            text += f"; and {len(tips) - _MAX_DESCRIBED} more"
        return f"{self.x.title}; {self.y.title}: {text}."

    @property
    def heatmap(self) -> Heatmap | None:
        """Return the chart's heatmap, which is then its only mark; None for other charts."""
        return next((mark for mark in self.marks if isinstance(mark, Heatmap)), None)


@dataclass(frozen=True)
class Panels:
    """Charts that share one picture file, in rows of ``columns``."""

    name: str
    charts: tuple[Chart, ...]
    columns: int = 2


def numbers(values: Iterable[float], scale: float = 1.0) -> Numbers:
    """Convert values, such as a column of a table, to floats times ``scale``."""
    return tuple(scale * float(value) for value in values)


@dataclass(frozen=True)
class Style:
    """Describe how a group of points looks, with its name in the legend."""

    label: str
    shape: Shape = "circle"
    tone: Tone = "accent"
    hollow: bool = False


def points(
    rows: pd.DataFrame,
    columns: tuple[str, str, str],
    style: Style,
    *,
    tips: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
    size: float = 5.0,
) -> Points:
    """Return marks for the rows of a table; ``columns`` hold x, y and error bars."""
    x, y, error = columns
    return Points(
        numbers(rows[x]),
        numbers(rows[y]),
        numbers(rows[error]),
        tips=tips,
        names=names,
        label=style.label,
        shape=style.shape,
        tone=style.tone,
        size=size,
        hollow=style.hollow,
    )


@dataclass(frozen=True)
class Row:
    """One row of a section's table."""

    head: str  # the row's name, in the first column
    cells: tuple[str, ...]  # the other columns
    tag: str = ""  # a short label on the row, "" for none


@dataclass(frozen=True)
class Section:
    """One section of the page."""

    name: str  # its id on the page, and the file name of its table
    title: str  # its heading
    about: str  # what was measured, and how to read it
    header: tuple[str, ...]  # titles of the columns, the first for the rows' names
    groups: tuple[tuple[Row, ...], ...]  # rows of the table, in groups separated by a line
    findings: tuple[str, ...] = ()  # sentences
    folded: tuple[tuple[Row, ...], ...] = ()  # further rows, hidden until the reader expands them
    charts: tuple[Chart, ...] = ()  # charts above the table


def round_axis(
    title: str, low: float, high: float, *, exact: bool = False, padded: bool = False
) -> Axis:
    """Return a linear axis that ends a little beyond the data, or at the last round tick before that point.

    With ``exact`` it ends at the data, with ``padded`` always beyond. A NaN end, as of an empty table, is 0.
    """
    if not math.isfinite(low):
        low = 0.0
    if not math.isfinite(high):
        high = 0.0
    if high <= low:
        high = low + 1.0
    # Place the ticks, and the ends beyond the data
    most_intervals = 6 if exact or padded else 5
    ticks = _round_values(low, high, most_intervals)
    padding = 0.0 if exact else _ROOM * (ticks[1] - ticks[0])
    low -= padding
    high += padding
    if not padded:
        low = max(ticks[0], low)
        high = min(ticks[-1], high)
    return Axis(title, low, high, _plain(tick for tick in ticks if low <= tick <= high))


def error_axis(title: str, values: "pd.Series[float]", errors: "pd.Series[float]") -> Axis:
    """Return an axis over 0 and values with error bars; NaN: no bar."""
    bars = errors.fillna(0.0)
    low = (values - bars).min()
    high = (values + bars).max()
    return round_axis(title, min(0.0, low), max(0.0, high), padded=True)


def name_axis(title: str, names: Sequence[str], *, every: int = 1, down: bool = False) -> Axis:
    """Return an axis with a position per name, from 0, every ``every``-th labelled; with ``down`` from the top."""
    ticks = tuple((float(place), names[place]) for place in range(0, len(names), every))
    first = -0.5
    last = len(names) - 0.5
    if down:
        return Axis(title, last, first, ticks)
    return Axis(title, first, last, ticks)


def log_axis(title: str, low: float, high: float) -> Axis:
    """Return a logarithmic axis with round ticks, for ranges below two decades."""
    ticks = [tick for tick in _round_values(low, high, 7) if low <= tick <= high]
    return Axis(title, low, high, _plain(ticks), log=True)


def decades_axis(
    title: str, low: float, high: float, *, multiples: Sequence[int] = (1,), powers: bool = False
) -> Axis:
    """Return a logarithmic axis with ticks at ``multiples`` of each power of ten, written as ``powers`` or plainly."""
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    ticks = []
    for exponent in range(first, last + 1):
        for multiple in multiples:
            tick = multiple * 10.0**exponent
            text = f"10{str(exponent).translate(_SUPERSCRIPTS)}" if powers else f"{tick:,g}"
            if low <= tick <= high:
                ticks.append((tick, text))
    return Axis(title, low, high, tuple(ticks), log=True)


def spread_axis(title: str, low: float, high: float) -> Axis:
    """Return a logarithmic axis if positive values span a decade, else a linear one, which holds 0."""
    if 0 < _WIDE * low <= high < math.inf:
        return decades_axis(f"{title} (log)", low / _BEYOND, high * _BEYOND, multiples=(1, 2, 5))
    return round_axis(title, min(0.0, low), high)


def _plain(ticks: Iterable[float]) -> tuple[tuple[float, str], ...]:
    """Return (value, text) of each tick."""
    texts = []
    for tick in ticks:
        # Rounding removes what binary fractions add
        text = f"{round(tick, 10):g}".replace("-", "\N{MINUS SIGN}")
        texts.append((float(tick), text))
    return tuple(texts)


def _round_values(low: float, high: float, max_intervals: int) -> list[float]:
    """Return multiples of a round step that cover the range from ``low`` to ``high``; integers if it is above 3."""
    length = high - low
    decade = 10.0 ** math.floor(math.log10(length / max_intervals))
    for factor in (*_STEPS, *(10 * step for step in _STEPS)):
        step = decade * factor
        if length > 3 and step != round(step):
            continue
        # Multiples that are equal to an end but for rounding count as reaching it
        first = math.floor(low / step + 1e-9)
        last = math.ceil(high / step - 1e-9)
        if last - first <= max_intervals:
            return [number * step for number in range(first, last + 1)]
    raise AssertionError(f"no step for {low} to {high}")
