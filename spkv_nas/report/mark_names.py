"""Write the names of points and rules into matplotlib axes, beside what they name, where there is room.

A name covers no mark and no other name, and stays inside the axes. Widths of texts are estimates, because the page's
fonts are not known, so that a name is at the same place in a picture and on the page.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
from matplotlib import axes
from matplotlib.path import Path
from matplotlib.transforms import Bbox

from spkv_nas.report.chart import TONES, Chart, Points, Rule

LETTER = 6.6  # average width of a letter, in points
LINE = 15.0  # height of a line of text, in points
_GAP = 10.0  # between a point's centre and its name
_RULE_GAP = 6.0  # between a vertical rule and its name
_FAINT = 0.6  # names may cover marks of lower opacity
# Line from a name to what it names, as arguments of matplotlib
_LEADER = {
    "arrowstyle": "-",
    "color": TONES["muted"],
    "linewidth": 0.8,
    "shrinkA": 0,
    "shrinkB": 5,
}


@dataclass(frozen=True)
class _Place:
    """A place for a name, in points of the figure."""

    box: Bbox  # what the name covers
    anchor: tuple[float, float]  # the point of the name that is given
    # which point that is; vertically it is the middle
    alignment: Literal["left", "center", "right"]
    # where a line from what it names meets the box, as shares of its width and height; None for no line
    end: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Room:
    """Hold what is already drawn in axes."""

    inside: Bbox  # frame of the axes
    occupied: list[Bbox]  # boxes that names must not cover: marks and names
    names: list[Bbox] = field(default_factory=list)  # those of names

    def is_free(self, box: Bbox) -> bool:
        """Return whether a name can cover a box."""
        return not box.count_overlaps(self.occupied) and all(
            self.inside.contains(*corner) for corner in (box.min, box.max)
        )

    def is_crossed(self, at: tuple[float, float], place: _Place) -> bool:
        """Return whether the line from ``at`` to the name at a place crosses another name."""
        if place.end is None:
            return False
        line = Path([at, place.box.min + place.box.size * np.array(place.end)])
        return any(line.intersects_bbox(box) for box in self.names)

    def take(self, box: Bbox) -> None:
        """Reserve the box of a name."""
        self.occupied.append(box)
        self.names.append(box)


def draw_names(ax: axes.Axes, chart: Chart) -> None:
    """Write the names of rules, then of points; a name of a point that finds no room is left out."""
    room = _Room(ax.get_window_extent(), _obstacles(ax))
    for mark in chart.marks:
        if isinstance(mark, Rule) and mark.label and mark.vertical:
            _name_vertical_rule(ax, mark, chart.y.high, room)
        elif isinstance(mark, Rule) and mark.label:
            _name_level_rule(ax, mark, room)
    # Name the points within rings first
    rings = _rings(chart)
    for is_ringed in (True, False):
        for mark in chart.marks:
            if isinstance(mark, Points):
                _name_points(ax, mark, room, rings, ringed=is_ringed)


def _rings(chart: Chart) -> dict[tuple[float, float], float]:
    """Return the radius of each ring by its centre: hollow marks without a text, around a point of another group."""
    rings = {}
    for mark in chart.marks:
        if isinstance(mark, Points) and mark.hollow and not mark.tips and not mark.names:
            for centre in zip(mark.x, mark.y, strict=True):
                rings[centre] = mark.size
    return rings


def _name_points(
    ax: axes.Axes,
    mark: Points,
    room: _Room,
    rings: Mapping[tuple[float, float], float],
    *,
    ringed: bool,
) -> None:
    """Write the names of the points within rings, or of the others."""
    for x, y, name in zip(mark.x, mark.y, mark.names, strict=False):
        radius = rings.get((x, y))
        if name and (radius is not None) == ringed:
            gap = _GAP if radius is None else radius + 4
            _name_point(ax, mark, (x, y), name, room, gap, stacks=bool(rings))


def _name_vertical_rule(ax: axes.Axes, rule: Rule, top: float, room: _Room) -> None:
    """Write the name of a vertical rule beside it, as high as there is room, else at the top."""
    at = _in_points(ax, (rule.value, top))
    num_heights = int(2 * room.inside.height / LINE) - 1
    heights = [-LINE * (0.5 + row / 2) for row in range(num_heights)]
    width = LETTER * len(rule.label)
    places = _places_beside(at, width, heights, _RULE_GAP)
    if not _write(ax, rule.label, at, places, room):
        ax.annotate(rule.label, at, (6, -8), textcoords="offset points", va="center")


def _name_level_rule(ax: axes.Axes, rule: Rule, room: _Room) -> None:
    """Write the name of a horizontal rule at an end that is free, above or below it; else above its right end."""
    transform = ax.get_yaxis_transform()
    _, y = transform.transform((0.0, rule.value))
    width = LETTER * len(rule.label)
    height = LINE - 3
    places = []
    for is_above in (True, False):
        bottom = y + 3 if is_above else y - 3 - height
        for end, left in ((1, room.inside.x1 - 6 - width), (0, room.inside.x0 + 6)):
            places.append((Bbox.from_bounds(left, bottom, width, height), end, is_above))
    free = [place for place in places if room.is_free(place[0])]
    box, end, is_above = (*free, *places)[0]
    room.take(box)
    ax.annotate(
        rule.label,
        (end, rule.value),
        (-6 if end == 1 else 6, 4 if is_above else -4),
        xycoords=transform,
        textcoords="offset points",
        ha="right" if end == 1 else "left",
        va="baseline" if is_above else "top",
    )


def _name_point(
    ax: axes.Axes,
    mark: Points,
    point: tuple[float, float],
    name: str,
    room: _Room,
    gap: float,
    *,
    stacks: bool,
) -> None:
    """Write the name of a point beside it, with ``stacks`` else above or below it; of a stroke always above it."""
    if mark.shape == "stroke":
        ax.annotate(name, point, (0, mark.size + 2), textcoords="offset points", ha="center")
        return
    # Try the point's own height, then one above and one below it, and so on
    heights = [0.0]
    for row in range(1, 6):
        heights += [row * LINE, -row * LINE]
    at = _in_points(ax, point)
    width = LETTER * len(name)
    places = _places_beside(at, width, heights, gap)
    if stacks:
        places = chain(places, _places_stacked(at, width, room.inside, gap))
    _write(ax, name, at, places, room)


def _in_points(ax: axes.Axes, point: tuple[float, float]) -> tuple[float, float]:
    """Convert data coordinates to points of the figure."""
    x, y = ax.transData.transform(point)
    return float(x), float(y)


def _write(
    ax: axes.Axes, name: str, at: tuple[float, float], places: Iterable[_Place], room: _Room
) -> bool:
    """Write a name of what is ``at`` a point at the first free place; return whether there was one.

    Places whose line crosses no other name come first.
    """
    chosen = None
    for place in places:
        if not room.is_free(place.box):
            continue
        if not room.is_crossed(at, place):
            chosen = place
            break
        chosen = chosen or place
    if chosen is None:
        return False
    room.take(chosen.box)
    ax.annotate(
        name,
        at,
        chosen.anchor,
        xycoords="figure points",
        textcoords="figure points",
        arrowprops=None if chosen.end is None else {**_LEADER, "relpos": chosen.end},
        ha=chosen.alignment,
        va="center",
        annotation_clip=False,
    )
    return True


def _places_beside(
    at: tuple[float, float], width: float, heights: Sequence[float], gap: float
) -> Iterator[_Place]:
    """Yield places for a name of a width right and left of ``at``, at each height above it."""
    x, y = at
    for height in heights:
        has_line = abs(height) > LINE / 2 and gap > _RULE_GAP
        bottom = y + height - LINE / 2
        yield _Place(
            Bbox.from_bounds(x + gap, bottom, width, LINE),
            anchor=(x + gap, y + height),
            alignment="left",
            end=(0.0, 0.5) if has_line else None,
        )
        yield _Place(
            Bbox.from_bounds(x - gap - width, bottom, width, LINE),
            anchor=(x - gap, y + height),
            alignment="right",
            end=(1.0, 0.5) if has_line else None,
        )


def _places_stacked(
    at: tuple[float, float], width: float, inside: Bbox, gap: float
) -> Iterator[_Place]:
    """Yield places for a name of a width above and below ``at``, centred there as far as the frame allows."""
    x, y = at
    # Keep off the frame, because widths of texts are estimates
    left = max(inside.x0 + LETTER, min(x - width / 2, inside.x1 - LETTER - width))
    share = (x - left) / width
    distance = gap + LINE / 2
    while distance < inside.height:
        for height, edge in ((distance, 0.0), (-distance, 1.0)):
            yield _Place(
                Bbox.from_bounds(left, y + height - LINE / 2, width, LINE),
                anchor=(left + width / 2, y + height),
                alignment="center",
                end=(share, edge),
            )
        distance += LINE / 2


def _obstacles(ax: axes.Axes) -> list[Bbox]:
    """Return the boxes of bars, lines and points that names should avoid."""
    boxes = [bar.get_window_extent() for bar in ax.patches]
    for drawn in ax.lines:
        path = drawn.get_path().transformed(drawn.get_transform())
        is_line = drawn.get_linestyle() != "None"
        if is_line:
            path = path.interpolated(24)
            reach = 2.0
        elif (drawn.get_alpha() or 1.0) > _FAINT:
            reach = max(7.0, drawn.get_markersize() / 2 + 1)
        else:
            continue
        for x, y in np.asarray(path.vertices):
            boxes.append(Bbox.from_bounds(x - reach, y - reach, 2 * reach, 2 * reach))
    return boxes
