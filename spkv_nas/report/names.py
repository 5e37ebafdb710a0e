"""Write the names of points and rules beside them, where they cover no mark and no other name; lengths are points."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.path import Path
from matplotlib.transforms import Bbox

from spkv_nas.report.chart import Bars, Chart, Line, Points, Rule
from spkv_nas.report.colours import TONES

LETTER, LINE = 6.6, 15.0  # average width of a letter, and height of a line of text
_FAINT = 0.6  # names may cover marks of lower opacity
_LEADER: dict[str, Any] = {"arrowstyle": "-", "color": TONES["muted"], "linewidth": 0.8, "shrinkA": 0, "shrinkB": 5}


def draw_names(ax: Axes, chart: Chart) -> None:
    """Write the names of rules and points; a name of a point that finds no room is left out."""
    occupied, inside = _obstacles(ax, chart), ax.get_window_extent()
    to_points: Any = ax.transData.transform
    for mark in chart.marks:
        match mark:
            case Rule() if mark.label and mark.vertical:
                top = to_points((mark.value, chart.y.high))
                heights = [-LINE * (0.5 + row / 2) for row in range(int(2 * inside.height / LINE) - 1)]
                if not _write(ax, mark.label, top, heights, occupied, gap=6):
                    ax.annotate(mark.label, top, (6, -8), textcoords="offset points", va="center")
            case Rule() if mark.label:
                beside: Any = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
                ax.annotate(mark.label, (1, mark.value), (6, 0), **beside)
            case Points():
                for x, y, name in zip(mark.x, mark.y, mark.names, strict=False):
                    if mark.shape == "stroke":
                        ax.annotate(name, (x, y), (0, mark.size + 2), textcoords="offset points", ha="center")
                    elif name:
                        heights = [0.0, *(sign * row * LINE for row in range(1, 6) for sign in (1, -1))]
                        _write(ax, name, to_points((x, y)), heights, occupied)


def _write(ax: Axes, name: str, at: Any, heights: list[float], occupied: list[Bbox], *, gap: float = 10) -> bool:
    """Write a name right or left of a position [2], at the first of some heights above it where there is room.

    ``occupied`` are the boxes to avoid, to which the name's is added. Returns whether there was room within the axes.
    """
    width, inside = LETTER * len(name), ax.get_window_extent()
    for height in heights:
        for left in (gap, -gap - width):
            # Look for a box that overlaps nothing
            box = Bbox.from_bounds(at[0] + left, at[1] + height - LINE / 2, width, LINE)
            if box.count_overlaps(occupied) or not all(inside.contains(*corner) for corner in (box.min, box.max)):
                continue
            # Write the name, with a line to a point at another height
            occupied.append(box)
            leader = _LEADER | {"relpos": (left < 0, 0.5)} if abs(height) > LINE / 2 and gap > 6 else None
            text = (at[0] + (gap if left > 0 else -gap), at[1] + height)
            style: Any = {"ha": "left" if left > 0 else "right", "va": "center", "annotation_clip": False}
            ax.annotate(name, at, text, "figure points", "figure points", leader, **style)
            return True
    return False


def _obstacles(ax: Axes, chart: Chart) -> list[Bbox]:
    """Return the boxes of marks that names should avoid."""
    boxes: list[Bbox] = []
    extent, to_points = ax.get_window_extent(), ax.transData.transform
    for mark in chart.marks:
        match mark:
            case Line():
                vertices: Any = Path(to_points(np.column_stack([mark.x, mark.y]))).interpolated(24).vertices
                boxes += [Bbox.from_bounds(x - 2, y - 2, 4, 4) for x, y in vertices]
            case Points() if mark.opacity > _FAINT:
                error = np.nan_to_num(mark.error or np.zeros(len(mark.x)))
                tops = to_points(np.column_stack([mark.x, mark.y + error]))[:, 1]
                for (x, y), top in zip(to_points(np.column_stack([mark.x, mark.y])), tops, strict=True):
                    boxes.append(Bbox.from_bounds(x - 7, y - max(7, top - y), 14, 2 * max(7, top - y)))
            case Bars():
                corners = zip(mark.low, mark.high, mark.height, strict=True)
                boxes += [Bbox(to_points([(low, 0.0), (high, height)])) for low, high, height in corners]
            case Rule():
                (x, y), (left, bottom, right, top) = to_points((mark.value, mark.value)), extent.extents
                ends = [(x - 2, bottom), (x + 2, top)] if mark.vertical else [(left, y - 2), (right, y + 2)]
                boxes.append(Bbox(ends))
    return boxes
