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
from typing import Any

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
from spkv_nas.report.chart import (
    TONES,
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
)
from spkv_nas.report.mark_names import LETTER, LINE, draw_names

CHOSEN = "#d6006c"
SHADES = 65
_SAMPLE = 40.0  # width of a legend entry's sample, with the space around it
# Clip box of lines in axes coordinates, with a margin of 1 %
_CLIP = Bbox([[-0.01, -0.01], [1.01, 1.01]])
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
            draw_names(ax, panel)
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
    num_lines = _draw_legend(ax, chart)
    if chart.heading:
        ax.set_title(chart.heading, loc="left", fontsize=12, pad=8 + num_lines * LINE)


def _draw_legend(ax: axes.Axes, chart: Chart) -> int:
    """Draw the legend above the axes; return its number of lines."""
    num_lines, columns = _legend_shape(chart)
    if not num_lines:
        return 0
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
    return num_lines


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
