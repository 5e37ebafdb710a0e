"""Draw charts with matplotlib, for notebooks, as files, and by ``page_svg`` for the page.

One unit of a chart is one point. Figures are made without pyplot, so that no display is needed, and the same chart
gives the same bytes. Names are drawn literally (``$`` starts no formula).
"""

import io
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path as FilePath
from typing import Any, Literal

import numpy as np
from matplotlib import axes, colormaps, colors, rc_context, ticker
from matplotlib.axis import Axis as Ruler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.path import Path
from matplotlib.transforms import Affine2D, Bbox, TransformedBbox

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.files import write_atomic
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report import density_charts
from spkv_nas.report.chart import (
    Axis,
    Band,
    Bars,
    Chart,
    Dash,
    Heatmap,
    Line,
    Mark,
    Panels,
    Points,
    Rule,
    Tone,
)

# The page has variables of these names, for light and dark mode
TONES: dict[Tone | Literal["line"], str] = {
    "accent": "#1f5fa8",
    "muted": "#566173",
    "second": "#b05a00",
    "third": "#2e7d4f",
    "ink": "#1b2330",
    "line": "#dde1e8",  # of a grid
}
CHOSEN = "#d6006c"
SHADES = 65
LETTER = 6.6  # average width of a letter
LINE = 15.0  # height of a line of text
_FAINT = 0.6  # names may cover marks of lower opacity
_LEADER = {
    "arrowstyle": "-",
    "color": TONES["muted"],
    "linewidth": 0.8,
    "shrinkA": 0,
    "shrinkB": 5,
}
_SAMPLE = 40.0  # width of a legend entry's sample, with the space around it
# Clip box of lines in axes coordinates, with a margin of 1 %
_CLIP = Bbox([[-0.01, -0.01], [1.01, 1.01]])
_GAP = 10.0  # between a point's centre and its name
_RULE_GAP = 6.0  # between a vertical rule and its name
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "stroke": "|"}
_DASHES: dict[Dash, Any] = {
    "solid": "-",
    "dashed": (0, (4, 2)),
    "dashdot": (0, (5, 1.6, 1.2, 1.6)),
    "dotted": (0, (1.2, 1.6)),
}
# matplotlib settings
_STYLE: Any = {
    "svg.hashsalt": "spkv-nas",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # TrueType, which journals require
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.edgecolor": TONES["muted"],
    "axes.labelcolor": TONES["muted"],
    "xtick.color": TONES["muted"],
    "ytick.color": TONES["muted"],
    "grid.color": TONES["line"],
    "ytick.major.size": 0,
    "figure.facecolor": "white",
    "text.color": TONES["ink"],
}


class Picture(Figure):
    """A figure that notebooks display by itself, although it was made without pyplot."""

    def _repr_png_(self) -> bytes:
        return _bytes(self, "png", dpi=160)


def picture(chart: Chart | Panels) -> Picture:
    """Return a chart's figure, for the caller to show, change or save."""
    with drawing():
        figure = draw(chart)
        figure.set_dpi(160)
        return figure


def save_chart(folder: FilePath, chart: Chart | Panels) -> None:
    """Write ``<name>.png``, ``<name>.svg`` and ``<name>.pdf``, each atomically."""
    formats: dict[str, Any] = {
        "png": {"dpi": 160},
        "svg": {"metadata": {"Date": None, "Creator": "spkv-nas"}},
        "pdf": {"metadata": {"CreationDate": None, "Creator": "spkv-nas", "Producer": None}},
    }
    with drawing():
        figure = draw(chart)
        for suffix, options in formats.items():
            write_atomic(folder / f"{chart.name}.{suffix}", _bytes(figure, suffix, **options))


@contextmanager
def drawing() -> Iterator[None]:
    """Apply this module's matplotlib settings while the block runs."""
    with rc_context(_STYLE), warnings.catch_warnings():
        # Missing glyphs are drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _bytes(figure: Figure, suffix: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, **options)
    return buffer.getvalue()


def draw(chart: Chart | Panels) -> Picture:
    """Return the figure of a chart or of panels."""
    panels = Panels(chart.name, (chart,), 1) if isinstance(chart, Chart) else chart
    columns = min(panels.columns, len(panels.charts))
    rows = math.ceil(len(panels.charts) / columns)
    # Create one figure for all panels
    widths, heights = zip(*map(_size, panels.charts), strict=True)
    size = (columns * max(widths) / 72, rows * max(heights) / 72)
    figure = Picture(figsize=size, dpi=72, layout="constrained")
    FigureCanvasAgg(figure)
    # Draw the panels
    for number, panel in enumerate(panels.charts, 1):
        ax = figure.add_subplot(rows, columns, number)
        if panel.heatmap is None:
            _draw_chart(ax, panel)
        else:
            _draw_map(ax, panel, panel.heatmap)
    # Settle the margins, then write the names of marks where there is room
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for ax, panel in zip(figure.axes, panels.charts, strict=False):
        if panel.heatmap is None:
            _draw_names(ax, panel)
    return figure


def _size(chart: Chart) -> tuple[float, float]:
    """Return the width and height of a chart in a picture, in points."""
    cells = chart.heatmap
    if cells is None:
        num_lines, _ = _legend_shape(chart)
        if chart.heading:
            num_lines += 1
        return chart.width, chart.height + LINE * num_lines
    rows = len(cells.values)
    columns = len(cells.values[0])
    if not cells.written:
        return max(330, 65 + 17 * columns), 68 + 17 * rows
    margins = 137 if cells.legend else 86
    return max(430, margins + 30 * columns), 72 + 30 * max(rows, 3)


def _legend_shape(chart: Chart) -> tuple[int, int]:
    """Return the lines and columns of the legend above the axes, which has as many columns as have room."""
    labels = {mark.label for mark in chart.marks if isinstance(mark, Line | Band | Points)}
    labels.discard("")
    if not labels:
        return 0, 0
    longest = max(len(label) for label in labels)
    widest = _SAMPLE + 0.9 * LETTER * longest
    columns = max(1, int(chart.width / widest))
    columns = min(columns, len(labels))
    return math.ceil(len(labels) / columns), columns


def _draw_chart(ax: axes.Axes, chart: Chart) -> None:
    """Draw a chart of any marks but a heatmap."""
    # Axes
    ax.set(xscale="log" if chart.x.log else "linear", yscale="log" if chart.y.log else "linear")
    ax.set(xlim=(chart.x.low, chart.x.high), ylim=(chart.y.low, chart.y.high))
    for ruler, axis in ((ax.xaxis, chart.x), (ax.yaxis, chart.y)):
        _draw_axis(ruler, axis)
    ax.yaxis.label.set(rotation_mode="anchor")
    ax.grid(axis="y")
    if chart.y.title and chart.y.low < 0 < chart.y.high:
        ax.axhline(0, color=TONES["muted"], linewidth=1.2, zorder=1)
    # Marks, legend, title
    for number, mark in enumerate(chart.marks):
        _draw_mark(ax, mark, f"{chart.name}/mark {number}")
    lines, columns = _legend_shape(chart)
    if lines:
        legend = ax.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=columns,
            fontsize=11,
            borderaxespad=0.5,
            borderpad=0,
            columnspacing=1,
            labelspacing=0.2,
        )
        for sample in legend.legend_handles:
            if isinstance(sample, Line2D):
                sample.set_markersize(min(sample.get_markersize(), 10.0))
    if chart.heading:
        ax.set_title(chart.heading, loc="left", fontsize=12, pad=8 + lines * LINE)


def _draw_axis(ruler: Ruler, axis: Axis) -> None:
    ruler.set_ticks([value for value, _ in axis.ticks], [text for _, text in axis.ticks])
    ruler.set_minor_locator(ticker.NullLocator())
    ruler.set_label_text(axis.title)


def _draw_mark(ax: axes.Axes, mark: Mark, name: str) -> None:
    """Draw one mark; ``name`` is the id of its elements with a tooltip, for the page."""
    match mark:
        case Band():
            ax.fill_between(
                mark.x,
                mark.low,
                mark.high,
                label=mark.label,
                color=TONES[mark.tone],
                alpha=mark.opacity,
                linewidth=0,
            )
        case Bars():
            bars = ax.bar(
                mark.low,
                mark.height,
                np.subtract(mark.high, mark.low),
                align="edge",
                color=TONES["accent"],
                edgecolor="white",
            )
            for index, bar in enumerate(bars):
                bar.set_gid(f"{name} {index}")
        case Line():
            (line,) = ax.plot(
                mark.x,
                mark.y,
                color=TONES[mark.tone],
                label=mark.label,
                linestyle=_DASHES[mark.dash],
                linewidth=mark.width,
                alpha=mark.opacity,
            )
            line.set_clip_box(TransformedBbox(_CLIP, ax.transAxes))
        case Rule():
            draw_line = ax.axvline if mark.vertical else ax.axhline
            draw_line(
                mark.value, color=TONES[mark.tone], linestyle=_DASHES[mark.dash], linewidth=1.4
            )
        case Points():
            _draw_points(ax, mark, name)


def _draw_points(ax: axes.Axes, mark: Points, name: str) -> None:
    """Draw points over their error bars."""
    # Keep the points with an error bar
    known = np.flatnonzero(np.isfinite(mark.error))
    if known.size:
        ax.errorbar(
            np.array(mark.x)[known],
            np.array(mark.y)[known],
            yerr=np.array(mark.error)[known],
            fmt="none",
            color=TONES[mark.tone],
            elinewidth=1.4,
            capsize=3,
        )
    (dots,) = ax.plot(mark.x, mark.y, **_point_style(mark), label=mark.label, zorder=3)
    if mark.tips:
        dots.set_gid(name)
    elif mark.layouts:
        dots.set_gid(name.replace("/mark", "/cloud"))


def _point_style(points: Points) -> dict[str, Any]:
    """Return how points look, as arguments of matplotlib."""
    colour = TONES[points.tone]
    face = colour
    edge = "none"
    edge_width = 0.0
    if points.hollow:
        face = "white"
        edge = colour
        edge_width = 1.6
    elif points.shape == "stroke":
        edge = colour
        edge_width = 3.0
    elif points.opacity == 1:
        edge = "white"
        edge_width = 1.0
    diameter = 2.4 if points.shape == "triangle" else 2.0
    return {
        "color": colour,
        "marker": _MARKERS[points.shape],
        "linestyle": "",
        "markersize": diameter * points.size,
        "clip_on": False,
        "markerfacecolor": face,
        "markeredgecolor": edge,
        "markeredgewidth": edge_width,
        "alpha": points.opacity,
    }


def _draw_map(ax: axes.Axes, chart: Chart, cells: Heatmap) -> None:
    """Draw a heatmap with its axes, marked cells and colour bar."""
    import seaborn as sns  # imported here because it is slow and only maps need it

    # Cells
    values = np.array(cells.values)
    rows, columns = values.shape
    texts = None
    if cells.written:
        texts = np.array([[cells.scale.text(value) for value in row] for row in cells.values])
    sns.heatmap(
        cells.scale.fraction(values),
        ax=ax,
        vmin=0,
        vmax=1,
        cmap="cividis",
        square=True,
        cbar=False,
        linecolor="white",
        linewidths=0.8 if cells.written else 1.2,
        xticklabels=False,
        yticklabels=False,
        annot=texts,
        annot_kws={"fontsize": 8.5},
        fmt="",
    )
    # Seaborn's cells start at integers, a chart's are centred on them: shift by half a cell
    for artist in (*ax.collections, *ax.texts):
        artist.set_transform(Affine2D().translate(-0.5, -0.5) + ax.transData)
    # Axes
    size = 9 if cells.written else 8
    for ruler, axis in ((ax.xaxis, chart.x), (ax.yaxis, chart.y)):
        _draw_axis(ruler, axis)
        ruler.label.set_fontsize(size + 0.5)
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    ax.tick_params(length=0, labelsize=size)
    _mark_cells(ax, cells)
    ax.set_title(chart.heading, loc="left", fontsize=11 if cells.written else 9.5)
    if cells.legend:
        _draw_colour_bar(ax, cells, columns)


def _mark_cells(ax: axes.Axes, cells: Heatmap) -> None:
    """Draw the outlines and dots of the marked cells, and the letters of all."""
    for row, column in cells.chosen:
        corner = (column - 0.44, row - 0.44)
        ax.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, edgecolor=CHOSEN, linewidth=1.8))
        ax.plot(column, row, "o", color="white", markeredgecolor="black", markersize=3.2)
    for row, letters in enumerate(cells.letters):
        for column, letter in enumerate(letters):
            if not letter.strip():
                continue
            share = float(cells.scale.fraction(cells.values[row][column]))
            _, ink = cividis(share)
            ax.text(column, row, letter, ha="center", va="center", fontsize=6.5, color=ink)


def _draw_colour_bar(ax: axes.Axes, cells: Heatmap, columns: int) -> None:
    """Draw the colour scale of a map right of it, as tall as it is."""
    width = 0.35 / columns
    bar_axes = ax.inset_axes((1.0 + width, 0, width, 1))
    bar = ax.figure.colorbar(ax.collections[0], cax=bar_axes)
    tick_values = cells.scale.ticks
    tick_texts = [cells.scale.text(value) for value in tick_values]
    bar.set_ticks(cells.scale.fraction(tick_values).tolist(), labels=tick_texts, fontsize=9)
    bar.set_label(cells.legend, fontsize=9.5)
    bar.outline.set_visible(False)


@dataclass(frozen=True)
class _Place:
    """A place for a name, in points of the figure."""

    box: Bbox  # what the name covers
    anchor: tuple[float, float]  # the point of the name that is given
    alignment: Literal[
        "left", "center", "right"
    ]  # which point that is; vertically it is the middle
    # where a line from what it names meets the box, as shares of its width and height; None for no line
    end: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Room:
    """What is already drawn in axes."""

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


def _draw_names(ax: axes.Axes, chart: Chart) -> None:
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
    rights = Bbox.from_bounds(room.inside.x1 - 6 - width, y + 3, width, height)
    lefts = rights.translated(room.inside.x0 + 12 + width - room.inside.x1, 0.0)
    below = -height - 6
    places = [
        (rights, 1, "right", 4),
        (lefts, 0, "left", 4),
        (rights.translated(0.0, below), 1, "right", -4),
        (lefts.translated(0.0, below), 0, "left", -4),
    ]
    free = (place for place in places if room.is_free(place[0]))
    box, end, alignment, offset = next(free, places[0])
    room.take(box)
    ax.annotate(
        rule.label,
        (end, rule.value),
        (-6 if end else 6, offset),
        xycoords=transform,
        textcoords="offset points",
        ha=alignment,
        va="baseline" if offset > 0 else "top",
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


def cividis(value: float) -> tuple[str, str]:
    """Return the colour of ``value``, clipped to [0, 1], and black or white for text on it (WCAG contrast)."""
    share = min(1.0, max(0.0, float(value)))
    rgb = np.array(colormaps["cividis"](share)[:3])
    # Relative luminance of sRGB
    curved = ((rgb + 0.055) / 1.055) ** 2.4
    linear = np.where(rgb <= 0.04045, rgb / 12.92, curved)
    luminance = float(linear @ [0.2126, 0.7152, 0.0722])
    ink = "#000" if luminance > 0.179 else "#fff"
    return colors.to_hex(rgb.tolist()), ink


def plot_head_scores(scores: HeadScores) -> Picture:
    """Plot the score of every KV head as a matplotlib figure, as in the report."""
    return picture(density_charts.density_chart(scores))


def plot_layout(layout: Layout, scores: HeadScores | None = None) -> Picture:
    """Plot a layout's global heads, marked on head scores if given; ``UserError``: the scores have another grid."""
    if scores is None:
        return picture(density_charts.grid_chart(layout))
    covered = coverage(scores, layout)
    return picture(density_charts.layout_chart(scores, layout.strategy, layout, covered, number=1))
