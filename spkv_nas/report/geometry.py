"""The marks of a chart and where its labels go: scales, dots, texts. Lengths are SVG user units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.ticker import MaxNLocator

WIDTH, HEIGHT = 400, 280  # of a chart: narrow, so that its text stays readable when a phone scales it down
LETTER = 6.6  # width of one letter of a label, on average
LINE = 15  # height of a label

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Axis:
    """A linear scale from data (``low`` to ``high``) to user units (``start`` to ``stop``)."""

    low: float
    high: float
    start: float
    stop: float
    title: str
    ticks: tuple[tuple[float, str], ...]

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


@dataclass(frozen=True)
class Dot:
    """A mark at (x, y); ``kind`` chooses its shape, ``error`` is the vertical extent of its error bar."""

    x: float
    y: float
    kind: str
    tip: str = ""
    error: tuple[float, float] | None = None


@dataclass(frozen=True)
class Text:
    """A label; ``leader`` is where a thin line leads from it, when it had to move away from its mark."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    leader: tuple[float, float] | None = None


@dataclass(frozen=True)
class Chart:
    """One chart: axes and marks, in user units. ``description`` says in words what there is to see."""

    name: str
    title: str
    description: str
    x: Axis
    y: Axis
    height: float = HEIGHT
    width: float = WIDTH
    grid: bool = True
    bands: list[str] = field(default_factory=list)  # paths
    lines: list[tuple[int, str]] = field(default_factory=list)  # (style, points)
    bars: list[tuple[float, float, float, float, str]] = field(default_factory=list)  # x, y, width, height, tip
    dots: list[Dot] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    legend: list[str] = field(default_factory=list)  # names of the lines, by style
    rules: list[tuple[float, str]] = field(default_factory=list)  # (x, label) of a vertical line


def make_axis(low: float, high: float, start: float, stop: float, title: str, *, exact: bool = False) -> Axis:
    """An axis with round ticks that reaches the next tick beyond the data, or with ``exact`` ends at the data."""
    if high <= low:
        high = low + 1.0
    locator = MaxNLocator(nbins=6 if exact else 5, steps=[1, 2, 2.5, 5, 10], integer=high - low > 3)
    values = [float(value) for value in locator.tick_values(low, high)]
    if exact:
        values = [value for value in values if low <= value <= high]
    else:
        low, high = values[0], values[-1]
    ticks = tuple((value, f"{round(value, 10):g}".replace("-", "\N{MINUS SIGN}")) for value in values)
    return Axis(low, high, start, stop, title, ticks)


def place_labels(
    marks: Sequence[tuple[float, float]],
    names: Sequence[str],
    within: Box,
    *,
    reach: Sequence[float],
    letter: float = LETTER,
    line: float = LINE,
    avoid: Sequence[Box] = (),
    farthest: int = 8,
    omit: bool = False,
) -> list[Text]:
    """Labels beside their marks that cover neither another label nor a mark: the nearest free place, greedily.

    All lengths in one unit, y downward. ``reach`` is how far each mark's error bar reaches up and down, ``avoid`` what
    else not to cover, ``farthest`` how many lines a label may move. A label that finds no free place keeps its first
    one, or with ``omit`` becomes empty.
    """
    extent = [max(7.0, bar) for bar in reach]
    taken: list[Box] = [(x - 7, y - e, x + 7, y + e) for (x, y), e in zip(marks, extent, strict=True)]
    taken += avoid
    labels = []
    for (x, y), name in zip(marks, names, strict=True):
        boxes = [
            (left, y + shift - line / 2, left + letter * len(name), y + shift + line / 2)
            for shift in (0.0, *(sign * k * line for k in range(1, farthest + 1) for sign in (-1, 1)))
            for left in (x + 10, x - 10 - letter * len(name))
        ]
        inside = [box for box in boxes if within[0] <= box[0] and within[1] <= box[1]]
        inside = [box for box in inside if box[2] <= within[2] and box[3] <= within[3]] or boxes[:1]
        free = (box for box in inside if not any(_overlap(box, other) for other in taken))
        box = next(free, None if omit else inside[0])
        if box is None:
            labels.append(Text(x, y, ""))
            continue
        taken.append(box)
        middle = (box[1] + box[3]) / 2
        moved = (x, y) if abs(middle - y) > line * 0.6 else None
        right = box[0] > x
        labels.append(Text(box[0] if right else box[2], middle, name, "start" if right else "end", moved))
    return labels


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
