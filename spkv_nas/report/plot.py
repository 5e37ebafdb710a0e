"""Draw charts with matplotlib, for notebooks, as files, and by ``page_svg`` for the page.

One unit of a chart is one point. Figures are made without pyplot, so that no display is needed, and the same chart
gives the same bytes. Names are drawn literally (``$`` starts no formula).
"""

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import axes, colormaps, colors, rc_context, ticker
from matplotlib.axis import Axis as Ruler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.transforms import Affine2D, Bbox, TransformedBbox

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.files import write_atomic
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report import density_charts
from spkv_nas.report.chart import Axis, Band, Bars, Chart, Heatmap, Line, Panels, Points, Rule, Tone

TONES: dict[
    Tone | Literal["line"], str
] = {  # the page has variables of these names, for light and dark mode
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
_LEADER: dict[str, Any] = {
    "arrowstyle": "-",
    "color": TONES["muted"],
    "linewidth": 0.8,
    "shrinkA": 0,
    "shrinkB": 5,
}
_SAMPLE = 40.0  # width of a legend entry's sample, with the space around it
_CLIP = Bbox(
    [[-0.01, -0.01], [1.01, 1.01]]
)  # clip box of lines in axes coordinates, with a margin of 1 %
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "stroke": "|"}
_DASHES: Any = {
    "solid": "-",
    "dashed": (0, (4, 2)),
    "dashdot": (0, (5, 1.6, 1.2, 1.6)),
    "dotted": (0, (1.2, 1.6)),
}
_STYLE: Any = {  # matplotlib settings
    "svg.hashsalt": "spkv-nas",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # TrueType, which journals require
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    **dict.fromkeys(
        ("axes.spines.left", "axes.spines.top", "axes.spines.right", "legend.frameon"), False
    ),
    **dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), TONES["muted"]
    ),
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


def save_chart(folder: Path, chart: Chart | Panels) -> None:
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
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font"
        )  # missing glyphs are drawn as boxes
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
    cells = chart.heatmap
    if cells is None:
        return chart.width, chart.height + LINE * (_legend_shape(chart)[0] + bool(chart.heading))
    rows = len(cells.values)
    columns = len(cells.values[0])
    if not cells.written:
        return max(330, 65 + 17 * columns), 68 + 17 * rows
    return max(430, (137 if cells.legend else 86) + 30 * columns), 72 + 30 * max(rows, 3)


def _legend_shape(chart: Chart) -> tuple[int, int]:
    """Return the lines and columns of the legend above the axes, which has as many columns as have room."""
    names = {mark.label for mark in chart.marks if isinstance(mark, Line | Band | Points)} - {""}
    widest = _SAMPLE + 0.9 * LETTER * max(map(len, names), default=0)
    columns = min(max(1, int(chart.width / widest)), len(names))
    return math.ceil(len(names) / max(1, columns)), columns


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
        spaces: Any = {
            "borderaxespad": 0.5,
            "borderpad": 0,
            "columnspacing": 1,
            "labelspacing": 0.2,
        }
        legend = ax.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize=11, **spaces
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


def _draw_mark(ax: axes.Axes, mark: Any, name: str) -> None:
    """Draw one mark; ``name`` is the id of its elements with a tooltip, for the page."""
    match mark:
        case Band():
            style: Any = {"color": TONES[mark.tone], "alpha": mark.opacity, "linewidth": 0}
            ax.fill_between(mark.x, mark.low, mark.high, label=mark.label, **style)
        case Bars():
            widths = np.subtract(mark.high, mark.low)
            bars = ax.bar(
                mark.low,
                mark.height,
                widths,
                align="edge",
                color=TONES["accent"],
                edgecolor="white",
            )
            for index, bar in enumerate(bars):
                bar.set_gid(f"{name} {index}")
        case Line():
            style = {
                "linestyle": _DASHES[mark.dash],
                "linewidth": mark.width,
                "alpha": mark.opacity,
            }
            (line,) = ax.plot(mark.x, mark.y, color=TONES[mark.tone], label=mark.label, **style)
            line.set_clip_box(TransformedBbox(_CLIP, ax.transAxes))
        case Rule():
            style = {"color": TONES[mark.tone], "linestyle": _DASHES[mark.dash], "linewidth": 1.4}
            (ax.axvline if mark.vertical else ax.axhline)(mark.value, **style)
        case Points():
            known = np.flatnonzero(np.isfinite(mark.error))  # of the points with an error bar
            if known.size:
                x, y, error = (np.array(values)[known] for values in (mark.x, mark.y, mark.error))
                ax.errorbar(
                    x, y, yerr=error, fmt="none", color=TONES[mark.tone], elinewidth=1.4, capsize=3
                )
            (dots,) = ax.plot(mark.x, mark.y, **_point_style(mark), label=mark.label, zorder=3)
            dots.set_gid(
                name if mark.tips else name.replace("/mark", "/cloud") if mark.layouts else None
            )


def _point_style(points: Points) -> dict[str, Any]:
    colour = TONES[points.tone]
    marker = _MARKERS[points.shape]
    size = (2.4 if points.shape == "triangle" else 2.0) * points.size
    style = {
        "color": colour,
        "marker": marker,
        "linestyle": "",
        "markersize": size,
        "clip_on": False,
    }
    edge, width = ("white", 1.0) if points.opacity == 1 else ("none", 0.0)
    if points.hollow:
        style["markerfacecolor"], edge, width = "white", colour, 1.6
    elif points.shape == "stroke":
        edge = colour
        width = 3.0
    return {**style, "markeredgecolor": edge, "markeredgewidth": width, "alpha": points.opacity}


def _draw_map(ax: axes.Axes, chart: Chart, cells: Heatmap) -> None:
    """Draw a heatmap with its axes, marked cells and colour bar."""
    import seaborn as sns  # imported here because it is slow and only maps need it

    # Cells
    values = np.array(cells.values)
    rows, columns = values.shape
    style: Any = {
        "vmin": 0,
        "vmax": 1,
        "cmap": "cividis",
        "square": True,
        "cbar": False,
        "linecolor": "white",
    }
    style |= {
        "linewidths": 0.8 if cells.written else 1.2,
        "xticklabels": False,
        "yticklabels": False,
    }
    if cells.written:
        texts = [[cells.scale.text(value) for value in row] for row in cells.values]
        style |= {"annot": np.array(texts), "annot_kws": {"fontsize": 8.5}, "fmt": ""}
    sns.heatmap(cells.scale.fraction(values), ax=ax, **style)
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
    # Marked cells
    for row, column in cells.chosen:
        ax.add_patch(
            Rectangle(
                (column - 0.44, row - 0.44), 0.88, 0.88, fill=False, edgecolor=CHOSEN, linewidth=1.8
            )
        )
        ax.plot(column, row, "o", color="white", markeredgecolor="black", markersize=3.2)
    for row, letters in enumerate(cells.letters):
        for column, letter in enumerate(letters):
            if letter.strip():
                ink = cividis(float(cells.scale.fraction(cells.values[row][column])))[1]
                ax.text(column, row, letter, ha="center", va="center", fontsize=6.5, color=ink)
    ax.set_title(chart.heading, loc="left", fontsize=11 if cells.written else 9.5)
    # Colour bar
    if cells.legend:
        bar_axes = ax.inset_axes((1.0 + 0.35 / columns, 0, 0.35 / columns, 1))  # as tall as the map
        bar = ax.figure.colorbar(ax.collections[0], cax=bar_axes)
        tick_values = cells.scale.ticks
        tick_texts = [cells.scale.text(value) for value in tick_values]
        bar.set_ticks(cells.scale.fraction(tick_values).tolist(), labels=tick_texts, fontsize=9)
        bar.set_label(cells.legend, fontsize=9.5)
        bar.outline.set_visible(False)


def _draw_names(ax: axes.Axes, chart: Chart) -> None:
    """Write the names of rules and points; a name of a point that finds no room is left out."""
    occupied = _obstacles(ax)
    inside = ax.get_window_extent()
    to_points: Any = ax.transData.transform
    for mark in chart.marks:
        match mark:
            case Rule() if mark.label and mark.vertical:
                top = to_points((mark.value, chart.y.high))
                heights = [
                    -LINE * (0.5 + row / 2) for row in range(int(2 * inside.height / LINE) - 1)
                ]
                if not _write(ax, mark.label, top, heights, occupied, gap=6):
                    ax.annotate(mark.label, top, (6, -8), textcoords="offset points", va="center")
            case Rule() if mark.label:
                right_end: Any = {
                    "xycoords": ax.get_yaxis_transform(),
                    "textcoords": "offset points",
                    "ha": "right",
                }
                ax.annotate(mark.label, (1, mark.value), (-6, 4), **right_end)
            case Points():
                for x, y, name in zip(mark.x, mark.y, mark.names, strict=False):
                    if mark.shape == "stroke":
                        ax.annotate(
                            name,
                            (x, y),
                            (0, mark.size + 2),
                            textcoords="offset points",
                            ha="center",
                        )
                    elif name:
                        heights = [
                            0.0,
                            *(sign * row * LINE for row in range(1, 6) for sign in (1, -1)),
                        ]
                        _write(ax, name, to_points((x, y)), heights, occupied)


def _write(
    ax: axes.Axes,
    name: str,
    at: Any,
    heights: list[float],
    occupied: list[Bbox],
    *,
    gap: float = 10,
) -> bool:
    """Write a name right or left of ``at``, at the first free height; return whether there was one."""
    width = LETTER * len(name)
    inside = ax.get_window_extent()
    for height in heights:
        for left in (gap, -gap - width):
            # Look for a box that overlaps nothing
            box = Bbox.from_bounds(at[0] + left, at[1] + height - LINE / 2, width, LINE)
            if box.count_overlaps(occupied) or not all(
                inside.contains(*corner) for corner in (box.min, box.max)
            ):
                continue
            # Write the name, with a line to a point at another height
            occupied.append(box)
            leader = (
                _LEADER | {"relpos": (left < 0, 0.5)}
                if abs(height) > LINE / 2 and gap > 6
                else None
            )
            text = (at[0] + (gap if left > 0 else -gap), at[1] + height)
            style: Any = {
                "ha": "left" if left > 0 else "right",
                "va": "center",
                "annotation_clip": False,
            }
            ax.annotate(name, at, text, "figure points", "figure points", leader, **style)
            return True
    return False


def _obstacles(ax: axes.Axes) -> list[Bbox]:
    """Return the boxes of bars, lines and points that names should avoid."""
    boxes = [bar.get_window_extent() for bar in ax.patches]
    for drawn in ax.lines:
        path = drawn.get_path().transformed(drawn.get_transform())
        is_line = drawn.get_linestyle() != "None"
        if is_line:
            path, reach = path.interpolated(24), 2
        elif (drawn.get_alpha() or 1.0) > _FAINT:
            reach = 7
        else:
            continue
        boxes += [
            Bbox.from_bounds(x - reach, y - reach, 2 * reach, 2 * reach)
            for x, y in np.asarray(path.vertices)
        ]
    return boxes


def cividis(value: float) -> tuple[str, str]:
    """Return the colour of ``value``, clipped to [0, 1], and black or white for text on it (WCAG contrast)."""
    rgb = np.array(colormaps["cividis"](min(1.0, max(0.0, float(value))))[:3])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ [0.2126, 0.7152, 0.0722])
    return colors.to_hex(rgb.tolist()), "#000" if luminance > 0.179 else "#fff"


def plot_head_scores(scores: HeadScores) -> Picture:
    """Plot the score of every KV head as a matplotlib figure, as in the report."""
    return picture(density_charts.density_chart(scores))


def plot_layout(layout: Layout, scores: HeadScores | None = None) -> Picture:
    """Plot a layout's global heads, marked on head scores if given; ``UserError``: the scores have another grid."""
    if scores is None:
        return picture(density_charts.grid_chart(layout))
    return picture(
        density_charts.layout_chart(
            scores, layout.strategy, layout, coverage(scores, layout), number=1
        )
    )
