"""Draw charts as picture files for papers and slides: PNG, SVG and PDF. The same chart gives the same bytes.

Charts are drawn without pyplot, so that neither global figure state nor a display is needed. SVG text stays text,
element ids come from a fixed salt, and no date is written. Names are drawn literally (``$`` starts no formula).
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis as Ruler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullLocator
from matplotlib.transforms import Affine2D, Bbox, ScaledTranslation, TransformedBbox
from numpy.typing import NDArray

from spkv_nas.base.files import write_atomic
from spkv_nas.report.chart import Axis, Band, Bars, Chart, Heatmap, Line, Panels, Points, Rule, legend_marks
from spkv_nas.report.colours import CHOSEN, TONES
from spkv_nas.report.labels import Label, chart_labels, margin

_CLIP = Bbox([[-0.01, -0.01], [1.01, 1.01]])  # clip box of lines in axes coordinates, with a margin of 1 %
_UNITS = 62.5  # user units of the page per inch
_POINTS = 72 / _UNITS
_LETTER, _LINE = 5.8, 13  # width of a label's letter and height of its line, in points
_LEGEND_LINE, _LEGEND_SAMPLE, _LEGEND_LETTER = 14.5, 43, 5.6
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "stroke": "|"}
_SIZES = {"circle": 0.62, "square": 0.56, "diamond": 0.56, "triangle": 0.66, "stroke": 1.0}  # to match the page
_DASHES: dict[str, Any] = {
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
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": TONES["muted"],
    "axes.labelcolor": TONES["ink"],
    "axes.grid": False,
    "xtick.color": TONES["ink"],
    "ytick.color": TONES["ink"],
    "figure.facecolor": "white",
    "legend.frameon": False,
}


class Picture(Figure):
    """A figure that notebooks display by itself, although it was made without pyplot."""

    def _repr_png_(self) -> bytes:
        """Return PNG bytes for IPython."""
        return _bytes(self, "png")


def picture(chart: Chart | Panels) -> Picture:
    """Return a chart's figure, for the caller to show, change or save."""
    with _drawing():
        return draw(chart)


def save_chart(folder: Path, chart: Chart | Panels) -> None:
    """Write ``<name>.png`` and ``<name>.svg``, each atomically."""
    with _drawing():
        figure = draw(chart)
        for suffix, options in (("png", {"dpi": 160}), ("svg", {"metadata": {"Date": None, "Creator": "spkv-nas"}})):
            write_atomic(folder / f"{chart.name}.{suffix}", _bytes(figure, suffix, **options))


def save_pdf(folder: Path, chart: Chart | Panels) -> None:
    """Write ``<name>.pdf`` atomically, with selectable text."""
    with _drawing():
        metadata = {"CreationDate": None, "Creator": "spkv-nas", "Producer": None}
        write_atomic(folder / f"{chart.name}.pdf", _bytes(draw(chart), "pdf", metadata=metadata))


@contextmanager
def _drawing() -> Iterator[None]:
    """Apply this module's matplotlib settings while the block runs."""
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # missing glyphs are drawn as boxes
        yield


def _bytes(figure: Figure, suffix: str, **options: Any) -> bytes:
    """Return a figure in the format of ``suffix``."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, **options)
    return buffer.getvalue()


def draw(chart: Chart | Panels) -> Picture:
    """Return the figure of a chart or of panels, with its layout final."""
    panels = Panels(chart.name, (chart,), 1) if isinstance(chart, Chart) else chart
    columns = min(panels.columns, len(panels.charts))
    rows = math.ceil(len(panels.charts) / columns)
    # Create one figure for all panels
    sizes = [_size(panel) for panel in panels.charts]
    figure = Picture(
        figsize=(columns * max(width for width, _ in sizes), rows * max(height for _, height in sizes)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    panel_axes = list(zip(panels.charts, grid, strict=False))
    # Draw the panels; hide the axes that are left over
    for panel, ax in panel_axes:
        _draw_chart(figure, ax, panel)
    for ax in grid[len(panels.charts) :]:
        ax.set_axis_off()
    # Settle the layout, with room for labels beside the axes
    reserved = [_reserve_margin(ax, panel) for panel, ax in panel_axes]
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for artist in reserved:
        artist.remove()
    # Place labels, which needs final coordinates
    for panel, ax in panel_axes:
        if panel.heatmap is None:
            _draw_labels(figure, ax, panel)
    return figure


def _size(chart: Chart) -> tuple[float, float]:
    """Return a chart's (width, height) in inches."""
    cells = chart.heatmap
    if cells is None:
        return chart.width / _UNITS, chart.height / _UNITS
    rows, columns = len(cells.values), len(cells.values[0])
    if _has_long_names(chart):
        side = 0.62 * columns + 1.6
        return side + 0.6, side + 0.4
    if not cells.written:
        return max(4.6, 0.9 + 0.24 * columns), 0.95 + 0.24 * rows
    return max(6.0, (1.9 if cells.legend else 1.2) + 0.42 * columns), 1.0 + 0.42 * max(rows, 3)


def _has_long_names(chart: Chart) -> bool:
    """Return True if names along a map's horizontal axis are too long to stand side by side."""
    return max(len(text) for _, text in chart.x.ticks) > 4 and chart.heatmap is not None


def _draw_chart(figure: Figure, ax: Axes, chart: Chart) -> None:
    """Draw axes, marks, legend and title of one chart."""
    if chart.heatmap is not None:
        _draw_map(ax, chart, chart.heatmap)
        return
    # Axes
    if chart.x.log:
        ax.set_xscale("log")
    if chart.y.log:
        ax.set_yscale("log")
    _draw_axis(ax.xaxis, chart.x)
    _draw_axis(ax.yaxis, chart.y)
    ax.set_xlim(chart.x.low, chart.x.high)
    ax.set_ylim(chart.y.low, chart.y.high)
    if not chart.y.title:
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
    if chart.y.title and not chart.y.log and chart.y.low < 0 < chart.y.high:
        ax.axhline(0, color=TONES["muted"], linewidth=0.8)
    # Marks, legend, title
    for mark in chart.marks:
        _draw_mark(ax, mark)
    lines = _draw_legend(figure, ax, chart)
    if chart.heading:
        ax.set_title(chart.heading, loc="left", fontsize=11, pad=6 + lines * _LEGEND_LINE)


def _draw_axis(ruler: Ruler, axis: Axis) -> None:
    """Set the ticks and the label of one axis."""
    ruler.set_ticks([value for value, _ in axis.ticks], [text for _, text in axis.ticks])
    ruler.set_minor_locator(NullLocator())
    ruler.set_label_text(axis.title)


def _draw_mark(ax: Axes, mark: Any) -> None:
    """Draw one mark."""
    match mark:
        case Band():
            ax.fill_between(mark.x, mark.low, mark.high, color=TONES[mark.tone], alpha=mark.opacity, linewidth=0)
        case Bars():
            widths = np.subtract(mark.high, mark.low)
            ax.bar(mark.low, mark.height, widths, align="edge", color=TONES["accent"], edgecolor="white")
        case Line():
            (line,) = ax.plot(mark.x, mark.y, **_line_style(mark))
            line.set_clip_box(TransformedBbox(_CLIP, ax.transAxes))
        case Rule():
            style = {"color": TONES[mark.tone], "linestyle": _DASHES[mark.dash], "linewidth": 1.0}
            (ax.axvline if mark.vertical else ax.axhline)(mark.value, **style)
        case Points() if mark.x:
            for x, y, error in zip(mark.x, mark.y, mark.error, strict=False):
                if not math.isnan(error):
                    ax.errorbar(x, y, yerr=error, fmt="none", ecolor=TONES[mark.tone], elinewidth=1.2, capsize=2.5)
            ax.plot(mark.x, mark.y, **_point_style(mark))


def _line_style(line: Line) -> dict[str, Any]:
    """Return matplotlib's options for a line."""
    return {
        "color": TONES[line.tone],
        "linestyle": _DASHES[line.dash],
        "linewidth": 0.8 * line.width,
        "alpha": line.opacity,
    }


def _point_style(points: Points) -> dict[str, Any]:
    """Return matplotlib's options for points."""
    colour = TONES[points.tone]
    size = 2 * points.size * _POINTS * _SIZES[points.shape]
    style: dict[str, Any] = {
        "color": colour,
        "marker": _MARKERS[points.shape],
        "linestyle": "",
        "markersize": size,
        "markeredgewidth": 0.6,
        "markeredgecolor": "white",
        "alpha": points.opacity,
        "clip_on": False,
    }
    if points.hollow:
        style |= {"markerfacecolor": "white", "markeredgecolor": colour, "markeredgewidth": 1.2}
    elif points.shape == "stroke":
        style |= {"markeredgecolor": colour, "markeredgewidth": 2.5}
    elif points.opacity < 1:
        style |= {"markeredgecolor": "none"}
    return style


def _draw_legend(figure: Figure, ax: Axes, chart: Chart) -> int:
    """Draw the legend above the axes and return its number of lines."""
    marks = legend_marks(chart)
    if not marks:
        return 0
    labels = [mark.label for mark in marks]
    columns = _legend_columns(labels, 72 * (_size(chart)[0] - 0.7))
    lift = ScaledTranslation(0, 4 / 72, figure.dpi_scale_trans)
    ax.legend(
        [_sample(mark) for mark in marks],
        labels,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        bbox_transform=ax.transAxes + lift,
        ncols=columns,
        fontsize=9,
        borderaxespad=0,
        borderpad=0,
        handlelength=2.6,
        columnspacing=1.4,
    )
    return math.ceil(len(marks) / columns)


def _sample(mark: Line | Band | Points) -> Any:
    """Return the legend's sample of a mark."""
    match mark:
        case Line():
            return Line2D([], [], **_line_style(mark))
        case Band():
            return Patch(color=TONES[mark.tone], alpha=mark.opacity, linewidth=0)
        case Points():
            return Line2D([], [], **_point_style(replace(mark, size=min(mark.size, 5.0))))


def _legend_columns(labels: Sequence[str], room: float) -> int:
    """Return the largest number of columns that fit into ``room`` points, filled one after the other."""
    for columns in range(len(labels), 1, -1):
        parts = np.array_split([_LEGEND_SAMPLE + _LEGEND_LETTER * len(label) for label in labels], columns)
        if sum(part.max() for part in parts) <= room:
            return columns
    return 1


def _reserve_margin(ax: Axes, chart: Chart) -> Any:
    """Add an invisible text as wide as the labels to the right of the axes, to reserve room for them."""
    width = margin(chart, _LETTER)
    text = ax.annotate("", (1, 0.5), xytext=(width, 0), xycoords="axes fraction", textcoords="offset points")
    text.set_text("." if width else "")
    text.set_alpha(0)
    return text


def _draw_labels(figure: Figure, ax: Axes, chart: Chart) -> None:
    """Place and draw the labels of a chart, in points."""
    scale, height = 72 / figure.dpi, figure.bbox.height * 72 / figure.dpi

    def project(x: float, y: float) -> tuple[float, float]:
        across, up = ax.transData.transform((x, y))
        return float(across * scale), float(height - up * scale)

    box = ax.get_window_extent()
    inside = (box.x0 * scale, height - box.y1 * scale, box.x1 * scale, height - box.y0 * scale)
    for label in chart_labels(chart, project, inside, letter=_LETTER, line=_LINE):
        _draw_label(ax, label, height)


def _draw_label(ax: Axes, label: Label, height: float) -> None:
    """Draw a label whose position is in points, y downward from ``height``."""
    arrow_start = label.leader or (label.x, label.y)
    ax.annotate(
        label.text,
        (arrow_start[0], height - arrow_start[1]),
        xytext=(label.x, height - label.y),
        xycoords="figure points",
        textcoords="figure points",
        ha={"start": "left", "middle": "center", "end": "right"}[label.anchor],
        va="center",
        fontsize=9,
        color=TONES["ink"],
        annotation_clip=False,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        arrowprops={"arrowstyle": "-", "color": TONES["muted"], "linewidth": 0.6} if label.leader else None,
    )


def _draw_map(ax: Axes, chart: Chart, cells: Heatmap) -> None:
    """Draw a heatmap with its axes, marked cells and colour bar."""
    import seaborn as sns  # imported here because it is slow and only maps need it

    # Cells
    values = np.array(cells.values)
    rows, columns = values.shape
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
        annot=_texts(cells) if cells.written else None,
        fmt="",
        annot_kws={"fontsize": 8.5},
        xticklabels=False,
        yticklabels=False,
    )
    # Seaborn's cells start at integers, a chart's are centred on them: shift by half a cell
    for artist in (*ax.collections, *ax.texts):
        artist.set_transform(Affine2D().translate(-0.5, -0.5) + ax.transData)
    # Axes
    _draw_axis(ax.xaxis, chart.x)
    _draw_axis(ax.yaxis, chart.y)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    size = 9 if cells.written else 8
    ax.tick_params(length=0, labelsize=size)
    ax.xaxis.label.set_fontsize(size + 0.5)
    ax.yaxis.label.set_fontsize(size + 0.5)
    if _has_long_names(chart):
        ax.tick_params(axis="x", labelrotation=35)
        for tick in ax.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")
    # Marked cells
    for row, column in cells.chosen:
        ax.add_patch(Rectangle((column - 0.44, row - 0.44), 0.88, 0.88, fill=False, edgecolor=CHOSEN, linewidth=1.8))
        ax.plot(column, row, "o", color="white", markeredgecolor="black", markersize=3.2)
    ax.set_title(chart.heading, loc="left", fontsize=11 if cells.written else 9.5)
    # Colour bar
    if cells.legend:
        bar_axes = ax.inset_axes((1.0 + 0.35 / columns, 0, 0.35 / columns, 1))  # as tall as the map
        bar = ax.figure.colorbar(ax.collections[0], cax=bar_axes)
        tick_values = cells.scale.ticks
        bar.set_ticks(
            cells.scale.fraction(tick_values).tolist(), labels=[cells.scale.text(value) for value in tick_values]
        )
        bar.set_label(cells.legend)
        bar.outline.set_visible(False)


def _texts(cells: Heatmap) -> NDArray[np.str_]:
    """Return the text of every cell."""
    return np.array([[cells.scale.text(value) for value in row] for row in cells.values])
