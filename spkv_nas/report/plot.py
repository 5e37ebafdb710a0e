"""A chart as a picture for papers and slides, as PNG and SVG. Same chart, same bytes.

Drawn without pyplot, so no global figure state and no display are needed. SVG text stays text; element ids come from
a fixed salt and no date is written. Names are drawn literally (``$`` starts no formula).
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

_CLIP = Bbox([[-0.01, -0.01], [1.01, 1.01]])  # of lines, in axes: whole at the ends of an axis
_UNITS = 62.5  # of the page, to the inch
_POINTS = 72 / _UNITS
_LETTER, _LINE = 5.8, 13  # of a label, in points
_LEGEND_LINE, _LEGEND_SAMPLE, _LEGEND_LETTER = 14.5, 43, 5.6
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "stroke": "|"}
_SIZES = {"circle": 0.62, "square": 0.56, "diamond": 0.56, "triangle": 0.66, "stroke": 1.0}  # to look as on the page
_DASHES: dict[str, Any] = {
    "solid": "-", "dashed": (0, (4, 2)), "dashdot": (0, (5, 1.6, 1.2, 1.6)), "dotted": (0, (1.2, 1.6))
}  # fmt: skip
_STYLE: Any = {  # settings of matplotlib
    "svg.hashsalt": "spkv-nas",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # as TrueType, which journals ask for
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
    """A figure that a notebook shows by itself, as pyplot, which would tell it how, is not there."""

    def _repr_png_(self) -> bytes:
        return _bytes(self, "png")


def picture(chart: Chart | Panels) -> Picture:
    """A chart's figure, to be shown, changed or saved by the caller."""
    with _drawing():
        return draw(chart)


def save_chart(folder: Path, chart: Chart | Panels) -> None:
    """Write ``<name>.png`` and ``<name>.svg``, each atomically."""
    with _drawing():
        figure = draw(chart)
        for suffix, options in (("png", {"dpi": 160}), ("svg", {"metadata": {"Date": None, "Creator": "spkv-nas"}})):
            write_atomic(folder / f"{chart.name}.{suffix}", _bytes(figure, suffix, **options))


def save_pdf(folder: Path, chart: Chart | Panels) -> None:
    """Write ``<name>.pdf``, atomically; its texts can be selected."""
    with _drawing():
        metadata = {"CreationDate": None, "Creator": "spkv-nas", "Producer": None}
        write_atomic(folder / f"{chart.name}.pdf", _bytes(draw(chart), "pdf", metadata=metadata))


@contextmanager
def _drawing() -> Iterator[None]:
    """Our settings of matplotlib, while the block runs."""
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # drawn as a box, still labelled
        yield


def _bytes(figure: Figure, suffix: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, **options)
    return buffer.getvalue()


def draw(chart: Chart | Panels) -> Picture:
    """The figure of a chart, or of charts side by side; its layout is settled."""
    panels = Panels(chart.name, (chart,), 1) if isinstance(chart, Chart) else chart
    columns = min(panels.columns, len(panels.charts))
    rows = math.ceil(len(panels.charts) / columns)
    sizes = [_size(one) for one in panels.charts]
    figure = Picture(
        figsize=(columns * max(width for width, _ in sizes), rows * max(height for _, height in sizes)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    drawn = list(zip(panels.charts, grid, strict=False))
    for one, ax in drawn:
        _draw_chart(figure, ax, one)
    for ax in grid[len(panels.charts) :]:
        ax.set_axis_off()
    reserved = [_reserve_margin(ax, one) for one, ax in drawn]
    figure.draw_without_rendering()  # settles the layout, so places are final
    figure.set_layout_engine("none")
    for artist in reserved:
        artist.remove()
    for one, ax in drawn:
        if one.heatmap is None:
            _draw_labels(figure, ax, one)
    return figure


def _size(chart: Chart) -> tuple[float, float]:
    """Inches."""
    cells = chart.heatmap
    if cells is None:
        return chart.width / _UNITS, chart.height / _UNITS
    rows, columns = len(cells.values), len(cells.values[0])
    if _turned(chart):
        side = 0.62 * columns + 1.6
        return side + 0.6, side + 0.4
    if not cells.written:
        return max(4.6, 0.9 + 0.24 * columns), 0.95 + 0.24 * rows
    return max(6.0, (1.9 if cells.legend else 1.2) + 0.42 * columns), 1.0 + 0.42 * max(rows, 3)


def _turned(chart: Chart) -> bool:
    """Whether names along the horizontal axis are too long to stand side by side."""
    return max(len(text) for _, text in chart.x.ticks) > 4 and chart.heatmap is not None


def _draw_chart(figure: Figure, ax: Axes, chart: Chart) -> None:
    if chart.heatmap is not None:
        _draw_map(ax, chart, chart.heatmap)
        return
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
    if chart.above is not None:
        above = ax.secondary_xaxis("top")
        _draw_axis(above.xaxis, chart.above)
        above.spines["top"].set_visible(True)
    for mark in chart.marks:
        _draw_mark(ax, mark)
    lines = _draw_legend(figure, ax, chart)
    if chart.heading:
        ax.set_title(chart.heading, loc="left", fontsize=11, pad=6 + lines * _LEGEND_LINE)


def _draw_axis(ruler: Ruler, axis: Axis) -> None:
    ruler.set_ticks([value for value, _ in axis.ticks], [text for _, text in axis.ticks])
    ruler.set_minor_locator(NullLocator())
    ruler.set_label_text(axis.title)


def _draw_mark(ax: Axes, mark: Any) -> None:
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
            (ax.axvline if mark.vertical else ax.axhline)(mark.at, **style)
        case Points() if mark.x:
            for x, y, error in zip(mark.x, mark.y, mark.error, strict=False):
                if not math.isnan(error):
                    ax.errorbar(x, y, yerr=error, fmt="none", ecolor=TONES[mark.tone], elinewidth=1.2, capsize=2.5)
            ax.plot(mark.x, mark.y, **_point_style(mark))


def _line_style(line: Line) -> dict[str, Any]:
    return {"color": TONES[line.tone], "linestyle": _DASHES[line.dash], "linewidth": 0.8 * line.width,
            "alpha": line.opacity}  # fmt: skip


def _point_style(points: Points) -> dict[str, Any]:
    colour = TONES[points.tone]
    size = 2 * points.size * _POINTS * _SIZES[points.shape]
    style: dict[str, Any] = {"color": colour, "marker": _MARKERS[points.shape], "linestyle": "", "markersize": size,
                             "markeredgewidth": 0.6, "markeredgecolor": "white", "alpha": points.opacity,
                             "clip_on": False}  # fmt: skip
    if points.hollow:
        style |= {"markerfacecolor": "white", "markeredgecolor": colour, "markeredgewidth": 1.2}
    elif points.shape == "stroke":
        style |= {"markeredgecolor": colour, "markeredgewidth": 2.5}
    elif points.opacity < 1:
        style |= {"markeredgecolor": "none"}
    return style


def _draw_legend(figure: Figure, ax: Axes, chart: Chart) -> int:
    """The legend above the axes, where it covers nothing; its number of lines."""
    marks = legend_marks(chart)
    if not marks:
        return 0
    labels = [mark.label for mark in marks]
    columns = _legend_columns(labels, 72 * (_size(chart)[0] - 0.7))
    lift = ScaledTranslation(0, (42 if chart.above else 4) / 72, figure.dpi_scale_trans)
    ax.legend(
        [_sample(mark) for mark in marks], labels, loc="lower left", bbox_to_anchor=(0, 1),
        bbox_transform=ax.transAxes + lift, ncols=columns, fontsize=9, borderaxespad=0, borderpad=0, handlelength=2.6,
        columnspacing=1.4,
    )  # fmt: skip
    return math.ceil(len(marks) / columns)


def _sample(mark: Line | Band | Points) -> Any:
    """What the legend shows for a mark."""
    match mark:
        case Line():
            return Line2D([], [], **_line_style(mark))
        case Band():
            return Patch(color=TONES[mark.tone], alpha=mark.opacity, linewidth=0)
        case Points():
            return Line2D([], [], **_point_style(replace(mark, size=min(mark.size, 5.0))))


def _legend_columns(labels: Sequence[str], room: float) -> int:
    """The most columns that fit into ``room`` points, filled one after the other."""
    for columns in range(len(labels), 1, -1):
        parts = np.array_split([_LEGEND_SAMPLE + _LEGEND_LETTER * len(label) for label in labels], columns)
        if sum(part.max() for part in parts) <= room:
            return columns
    return 1


def _reserve_margin(ax: Axes, chart: Chart) -> Any:
    """An invisible text as wide as the labels to the right of the axes, so that the layout leaves room for them."""
    width = margin(chart, _LETTER)
    text = ax.annotate("", (1, 0.5), xytext=(width, 0), xycoords="axes fraction", textcoords="offset points")
    text.set_text("." if width else "")
    text.set_alpha(0)
    return text


def _draw_labels(figure: Figure, ax: Axes, chart: Chart) -> None:
    scale, height = 72 / figure.dpi, figure.bbox.height * 72 / figure.dpi

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = ax.transData.transform((x, y))
        return float(across * scale), float(height - up * scale)

    box = ax.get_window_extent()
    inside = (box.x0 * scale, height - box.y1 * scale, box.x1 * scale, height - box.y0 * scale)
    for label in chart_labels(chart, at, inside, letter=_LETTER, line=_LINE):
        _draw_label(ax, label, height)


def _draw_label(ax: Axes, label: Label, height: float) -> None:
    """A label whose place is in points, y downward from ``height``."""
    start = label.leader or (label.x, label.y)
    ax.annotate(
        label.text,
        (start[0], height - start[1]),
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
    import seaborn as sns  # which other charts need not wait for

    values = np.array(cells.values)
    rows, columns = values.shape
    sns.heatmap(
        cells.scale.fraction(values), ax=ax, vmin=0, vmax=1, cmap="cividis", square=True, cbar=False,
        linecolor="white", linewidths=0.8 if cells.written else 1.2, annot=_texts(cells) if cells.written else None,
        fmt="", annot_kws={"fontsize": 8.5}, xticklabels=False, yticklabels=False,
    )  # fmt: skip
    for artist in (*ax.collections, *ax.texts):  # whose cells begin at whole numbers; a chart's are centred on them
        artist.set_transform(Affine2D().translate(-0.5, -0.5) + ax.transData)
    _draw_axis(ax.xaxis, chart.x)
    _draw_axis(ax.yaxis, chart.y)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    size = 9 if cells.written else 8
    ax.tick_params(length=0, labelsize=size)
    ax.xaxis.label.set_fontsize(size + 0.5)
    ax.yaxis.label.set_fontsize(size + 0.5)
    if _turned(chart):
        ax.tick_params(axis="x", labelrotation=35)
        for tick in ax.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")
    for row, column in cells.chosen:
        ax.add_patch(Rectangle((column - 0.44, row - 0.44), 0.88, 0.88, fill=False, edgecolor=CHOSEN, linewidth=1.8))
        ax.plot(column, row, "o", color="white", markeredgecolor="black", markersize=3.2)
    ax.set_title(chart.heading, loc="left", fontsize=11 if cells.written else 9.5)
    if cells.legend:
        beside = ax.inset_axes((1.0 + 0.35 / columns, 0, 0.35 / columns, 1))  # as high as the map
        bar = ax.figure.colorbar(ax.collections[0], cax=beside)
        marked = cells.scale.ticks
        bar.set_ticks(cells.scale.fraction(marked).tolist(), labels=[cells.scale.text(value) for value in marked])
        bar.set_label(cells.legend)
        bar.outline.set_visible(False)


def _texts(cells: Heatmap) -> NDArray[np.str_]:
    """What stands in the cells."""
    return np.array([[cells.scale.text(value) for value in row] for row in cells.values])
