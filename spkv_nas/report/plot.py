"""Draw charts with matplotlib: as figures for notebooks, and as picture files (PNG, SVG, PDF) for papers and slides.

``page_svg`` writes the same figures into the report page. One unit of a chart is one point. Figures are made without
pyplot, so that neither global state nor a display is needed, and the same chart gives the same bytes: SVG text stays
text, element ids come from a fixed salt, and no date is written. Names are drawn literally (``$`` starts no formula).
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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

from spkv_nas.base.files import write_atomic
from spkv_nas.report.chart import Axis, Band, Bars, Chart, Heatmap, Line, Panels, Points, Rule, legend_marks
from spkv_nas.report.colours import CHOSEN, TONES
from spkv_nas.report.names import LETTER, LINE, draw_names

_FOOT, _GAP = 48.0, 14.0  # below the axes, for ticks and title; above and to the right of them
_SAMPLE = 46.0  # width of a legend entry's sample, with the space around it
_CLIP = Bbox([[-0.01, -0.01], [1.01, 1.01]])  # clip box of lines in axes coordinates, with a margin of 1 %
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "stroke": "|"}
_DASHES: Any
_DASHES = {"solid": "-", "dashed": (0, (4, 2)), "dashdot": (0, (5, 1.6, 1.2, 1.6)), "dotted": (0, (1.2, 1.6))}
_STYLE: Any = {  # matplotlib settings
    "svg.hashsalt": "spkv-nas",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # TrueType, which journals require
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    **dict.fromkeys(("axes.spines.left", "axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), TONES["muted"]),
    "grid.color": TONES["line"],
    "ytick.major.size": 0,
    "figure.facecolor": "white",
    "text.color": TONES["ink"],
}


class Picture(Figure):
    """A figure that notebooks display by itself, although it was made without pyplot."""

    def _repr_png_(self) -> bytes:
        """Return PNG bytes for IPython."""
        return _bytes(self, "png", dpi=160)


def picture(chart: Chart | Panels) -> Picture:
    """Return a chart's figure, for the caller to show, change or save."""
    with drawing():
        figure = draw(chart)
        figure.set_dpi(160)
        return figure


def save_chart(folder: Path, chart: Chart | Panels) -> None:
    """Write ``<name>.png`` and ``<name>.svg``, each atomically."""
    with drawing():
        figure = draw(chart)
        for suffix, options in (("png", {"dpi": 160}), ("svg", {"metadata": {"Date": None, "Creator": "spkv-nas"}})):
            write_atomic(folder / f"{chart.name}.{suffix}", _bytes(figure, suffix, **options))


def save_pdf(folder: Path, chart: Chart | Panels) -> None:
    """Write ``<name>.pdf`` atomically, with selectable text."""
    with drawing():
        metadata = {"CreationDate": None, "Creator": "spkv-nas", "Producer": None}
        write_atomic(folder / f"{chart.name}.pdf", _bytes(draw(chart), "pdf", metadata=metadata))


@contextmanager
def drawing() -> Iterator[None]:
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
    """Return the figure of a chart or of panels."""
    panels = Panels(chart.name, (chart,), 1) if isinstance(chart, Chart) else chart
    columns = min(panels.columns, len(panels.charts))
    rows = math.ceil(len(panels.charts) / columns)
    # Create one figure for all panels
    sizes = [_size(panel) for panel in panels.charts]
    width, height = columns * max(width for width, _ in sizes), rows * max(height for _, height in sizes)
    figure = Picture(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasAgg(figure)
    # Draw the panels, each in its cell; maps settle their own margins
    if any(panel.heatmap for panel in panels.charts):
        figure.set_layout_engine("constrained")
    for number, panel in enumerate(panels.charts):
        if panel.heatmap is not None:
            _draw_map(figure.add_subplot(rows, columns, number + 1), panel, panel.heatmap)
            continue
        row, column = divmod(number, columns)
        left, bottom, right, top = _frame(panel, *sizes[number])
        x, y = column * width / columns, (rows - row) * height / rows - sizes[number][1]
        box = ((x + left) / width, (y + bottom) / height, (right - left) / width, (top - bottom) / height)
        _draw_chart(figure.add_axes(box), panel)
    return figure


def _size(chart: Chart) -> tuple[float, float]:
    """Return a chart's (width, height)."""
    cells = chart.heatmap
    if cells is None:
        return chart.width, chart.height + LINE * (_legend_shape(chart)[0] + bool(chart.heading))
    rows, columns = len(cells.values), len(cells.values[0])
    if _has_long_names(chart):
        side = 45 * columns + 115
        return side + 43, side + 29
    if not cells.written:
        return max(330, 65 + 17 * columns), 68 + 17 * rows
    return max(430, (137 if cells.legend else 86) + 30 * columns), 72 + 30 * max(rows, 3)


def _frame(chart: Chart, width: float, height: float) -> tuple[float, float, float, float]:
    """Return the position of a chart's axes as left, bottom, right, top, with room for the texts around them."""
    ticks = LETTER * max((len(text) for _, text in chart.y.ticks), default=0)
    left = max(56.0, ticks + 34) if chart.y.title else min(150.0, ticks + 22)
    beside = [mark.label for mark in chart.marks if isinstance(mark, Rule) and not mark.vertical and mark.label]
    right = width - max([_GAP + 2, *(10 + LETTER * len(label) for label in beside)])
    return left, _FOOT, right, height - _GAP - LINE * (_legend_shape(chart)[0] + bool(chart.heading))


def _has_long_names(chart: Chart) -> bool:
    """Return True if names along a map's horizontal axis are too long to stand side by side."""
    return max(len(text) for _, text in chart.x.ticks) > 4 and chart.heatmap is not None


def _draw_chart(ax: Axes, chart: Chart) -> None:
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
    draw_names(ax, chart)
    lines, columns = _legend_shape(chart)
    if lines:
        left, scale = 4 - _frame(chart, *_size(chart))[0], ax.figure.dpi_scale_trans
        origin = ax.transAxes + ScaledTranslation(left / 72, 8 / 72, scale)
        spaces: Any = {"borderaxespad": 0, "borderpad": 0, "handlelength": 2.4, "columnspacing": 1, "labelspacing": 0.2}
        handles = {mark.label: _sample(mark) for mark in legend_marks(chart)}
        anchor: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "bbox_transform": origin, "ncols": columns}
        ax.legend([*handles.values()], [*handles], fontsize=11, **anchor, **spaces)
    if chart.heading:
        ax.set_title(chart.heading, loc="left", fontsize=12, pad=8 + lines * LINE)


def _draw_axis(ruler: Ruler, axis: Axis) -> None:
    """Set the ticks and the label of one axis."""
    ruler.set_ticks([value for value, _ in axis.ticks], [text for _, text in axis.ticks])
    ruler.set_minor_locator(NullLocator())
    ruler.set_label_text(axis.title)


def _draw_mark(ax: Axes, mark: Any, name: str) -> None:
    """Draw one mark; ``name`` is the id of its elements with a tooltip, for the page."""
    match mark:
        case Band():
            ax.fill_between(mark.x, mark.low, mark.high, color=TONES[mark.tone], alpha=mark.opacity, linewidth=0)
        case Bars():
            widths = np.subtract(mark.high, mark.low)
            bars = ax.bar(mark.low, mark.height, widths, align="edge", color=TONES["accent"], edgecolor="white")
            for index, bar in enumerate(bars):
                bar.set_gid(f"{name} {index}")
        case Line():
            (line,) = ax.plot(mark.x, mark.y, **_line_style(mark))
            line.set_clip_box(TransformedBbox(_CLIP, ax.transAxes))
        case Rule():
            style = {"color": TONES[mark.tone], "linestyle": _DASHES[mark.dash], "linewidth": 1.4}
            (ax.axvline if mark.vertical else ax.axhline)(mark.value, **style)
        case Points() if mark.x:
            known = np.flatnonzero(np.isfinite(mark.error))  # of the points with an error bar
            if known.size:
                x, y, error = (np.array(values)[known] for values in (mark.x, mark.y, mark.error))
                ax.errorbar(x, y, yerr=error, fmt="none", color=TONES[mark.tone], elinewidth=1.4, capsize=3)
            (dots,) = ax.plot(mark.x, mark.y, **_point_style(mark), zorder=3)
            dots.set_gid(name if mark.tips else name.replace("/mark", "/cloud") if mark.layouts else None)


def _line_style(line: Line) -> dict[str, Any]:
    """Return matplotlib's options for a line."""
    style = {"color": TONES[line.tone], "linestyle": _DASHES[line.dash]}
    return {**style, "linewidth": line.width, "alpha": line.opacity}


def _point_style(points: Points) -> dict[str, Any]:
    """Return matplotlib's options for points."""
    colour, marker = TONES[points.tone], _MARKERS[points.shape]
    size = (2.4 if points.shape == "triangle" else 2.0) * points.size
    style = {"color": colour, "marker": marker, "linestyle": "", "markersize": size, "clip_on": False}
    edge, width = ("white", 1.0) if points.opacity == 1 else ("none", 0.0)
    if points.hollow:
        style["markerfacecolor"], edge, width = "white", colour, 1.6
    elif points.shape == "stroke":
        edge, width = colour, 3.0
    return {**style, "markeredgecolor": edge, "markeredgewidth": width, "alpha": points.opacity}


def _sample(mark: Line | Band | Points) -> Any:
    """Return the legend's sample of a mark."""
    match mark:
        case Line():
            return Line2D([], [], **_line_style(mark))
        case Band():
            return Patch(color=TONES[mark.tone], alpha=mark.opacity, linewidth=0)
        case Points():
            return Line2D([], [], **{**_point_style(mark), "markersize": 2 * min(mark.size, 5.0)})


def _legend_shape(chart: Chart) -> tuple[int, int]:
    """Return the lines and columns of the legend above the axes: as many columns, filled in turn, as have room."""
    widths = [_SAMPLE + 0.9 * LETTER * len(mark.label) for mark in legend_marks(chart)]
    for columns in range(len(widths), 0, -1):
        parts = np.array_split(widths, columns)
        if columns == 1 or sum(part.max() for part in parts) <= chart.width:
            return math.ceil(len(widths) / columns), columns
    return 0, 0


def _draw_map(ax: Axes, chart: Chart, cells: Heatmap) -> None:
    """Draw a heatmap with its axes, marked cells and colour bar."""
    import seaborn as sns  # imported here because it is slow and only maps need it

    # Cells
    values = np.array(cells.values)
    rows, columns = values.shape
    style: Any = {"vmin": 0, "vmax": 1, "cmap": "cividis", "square": True, "cbar": False, "linecolor": "white"}
    style |= {"linewidths": 0.8 if cells.written else 1.2, "xticklabels": False, "yticklabels": False}
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
        tick_texts = [cells.scale.text(value) for value in tick_values]
        bar.set_ticks(cells.scale.fraction(tick_values).tolist(), labels=tick_texts, fontsize=9)
        bar.set_label(cells.legend, fontsize=9.5)
        bar.outline.set_visible(False)
