"""Draw charts as inline SVG of the report page, in colours that follow its dark mode.

Charts are the figures of ``plot``. A mark with a tooltip refers to the page's data, ``data-mark="mark,index"``; a cloud
of dots, ``data-cloud="mark"``. Maps of heads are one path per shade, and small ones reuse the cells of the large one,
which keeps thousands of cells short.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
from markupsafe import Markup
from matplotlib.backend_bases import GraphicsContextBase, RendererBase
from matplotlib.colors import to_hex
from matplotlib.path import Path
from matplotlib.transforms import Affine2D, Bbox, Transform
from numpy.typing import NDArray

from spkv_nas.artifacts.layout import GLOBAL, Layout
from spkv_nas.artifacts.score_kind import Measure
from spkv_nas.report.chart import TONES, Chart, Heatmap
from spkv_nas.report.density_charts import window_shades
from spkv_nas.report.mark_names import LETTER
from spkv_nas.report.plot import SHADES, cividis, draw, drawing

_LEFT = 58.0  # from the left edge of a large map to its cells
_WIDEST = 1048  # greatest width of a map's cells on the page
_FILLED = 0.92  # painted share of a cell's width and height
_ON = {"#000": "on-light", "#fff": "on-dark"}  # CSS class of text on a shade
_SWATCH = 20.0  # height of a line of the legend of windows, and width of its colour
_SCALE = 220.0  # length of a colour scale
_LETTER = 6.5  # width of a letter below it
# Colours of the page's theme
_VARIABLES = {"#ffffff": "var(--card)"}
_VARIABLES |= {colour: f"var(--{tone})" for tone, colour in TONES.items()}
_COMMANDS = {
    Path.MOVETO: "M",
    Path.LINETO: "L",
    Path.CURVE3: "Q",
    Path.CURVE4: "C",
    Path.CLOSEPOLY: "z",
}


class PageRenderer(RendererBase):
    """Write a figure as SVG elements without styles or ids; lengths are points, y downward."""

    def __init__(self, root: Element, width: float, height: float) -> None:
        """Append to ``root``, an ``svg`` element of the figure's size."""
        super().__init__()
        self._root = root
        self._size = (width, height)
        self._gids = [""]
        self._flip = Affine2D().scale(1, -1).translate(0, height)
        self._last: tuple[dict[str, str], Element] | None = None

    def get_canvas_width_height(self) -> tuple[float, float]:
        """Return the size in points."""
        return self._size

    def get_text_width_height_descent(
        self, s: str, prop: Any, ismath: Any
    ) -> tuple[float, float, float]:
        """Estimate a text's extent: the page's fonts are not known here."""
        size = prop.get_size_in_points()
        return LETTER / 12 * size * len(s), size, 0.2 * size

    def open_group(self, s: str, gid: str | None = None) -> None:
        """Remember an artist's id, which refers to the page's data."""
        self._gids.append(gid or "")

    def close_group(self, s: str) -> None:
        """Forget it."""
        self._gids.pop()

    def draw_path(
        self, gc: GraphicsContextBase, path: Path, transform: Transform, rgbFace: Any = None
    ) -> None:
        """Write a path; consecutive ones of one style are one element, unless they have a tooltip."""
        style = _style(gc, rgbFace) | self._reference()
        clip = self._clip(gc) if rgbFace is None else None
        self._path(style, _commands(path.transformed(transform + self._flip), clip))

    def draw_markers(
        self,
        gc: Any,
        marker_path: Path,
        marker_trans: Transform,
        path: Path,
        trans: Transform,
        rgbFace: Any = None,
    ) -> None:
        """Write a mark at every vertex: one by one if they have tooltips, dots without as one path."""
        # Find the shape, the style and the centres
        shape = marker_path.transformed(marker_trans + Affine2D().scale(1, -1))
        style = _style(gc, rgbFace)
        centres = np.asarray(path.transformed(trans + self._flip).vertices)
        codes: Any = shape.codes
        is_round = bool(np.isin(Path.CURVE4, codes))
        radius = shape.get_extents().width / 2
        reference = self._reference()
        if is_round and "stroke" not in style and "data-mark" not in reference:
            self._dots(style, centres, radius, reference)
            return
        # Write other marks one by one, in a group that has their style
        group = self._root
        clip = self._clip(gc)
        if is_round or reference:
            group = add(self._root, "g", **style)
            self._last = None
        for index, (x, y) in enumerate(centres):
            data = {key: f"{value},{index}" for key, value in reference.items()}
            mark = Affine2D().translate(x, y)
            if is_round:
                add(group, "circle", cx=x, cy=y, r=radius, **data)
            elif data:
                add(group, "path", d=_commands(shape.transformed(mark)), **data)
            elif clip is None or clip.overlaps(shape.get_extents(mark)):
                self._path(style, _commands(shape.transformed(mark)))

    def _dots(
        self,
        style: dict[str, str],
        centres: NDArray[np.float64],
        radius: float,
        reference: dict[str, str],
    ) -> None:
        """Write dots without tooltips as one path, whose round line ends are the dots."""
        shades = {
            key.replace("fill", "stroke"): value
            for key, value in style.items()
            if key.startswith("fill")
        }
        dots = [(round(x), round(y)) for x, y in centres]
        # The page's data of a cloud is in the order of its dots
        if not reference:
            dots.sort()
        line = {"class": "dust", **shades, "stroke-width": px(2 * radius), **reference}
        self._path(line, _dust(dots))

    def draw_text(
        self,
        gc: Any,
        x: float,
        y: float,
        s: str,
        prop: Any,
        angle: float,
        ismath: Any = False,
        mtext: Any = None,
    ) -> None:
        """Write a text at its anchor, as its width is only estimated."""
        anchor_x, anchor_y = mtext.get_transform().transform(mtext.get_unitless_position())
        if angle:
            y = self._flip.transform((anchor_x, anchor_y))[1]
        else:
            x = anchor_x
        # Write only attributes that differ from their defaults
        attributes: dict[str, str | float] = {}
        anchor = {"center": "middle", "right": "end"}.get(mtext.get_ha())
        if anchor is not None:
            attributes["text_anchor"] = anchor
        if angle:
            attributes["transform"] = f"translate({px(x)} {px(y)}) rotate(-{angle:g})"
        else:
            attributes["x"] = x
            attributes["y"] = y
        if to_hex(gc.get_rgb()) == TONES["muted"]:
            attributes["class"] = "tick"
        size = prop.get_size_in_points()
        if size != 12:
            attributes["font_size"] = size
        add(self._root, "text", s, **attributes)
        self._last = None

    def _clip(self, gc: GraphicsContextBase) -> Bbox | None:
        """Return the box beyond which nothing is drawn."""
        box = gc.get_clip_rectangle()
        if box is None:
            return None
        _, height = self._size
        return Bbox.from_extents(box.x0, height - box.y1, box.x1, height - box.y0)

    def _path(self, style: dict[str, str], commands: str) -> None:
        """Append a path, to the last element if that has the same style and no tooltip."""
        has_tooltip = any(key.startswith("data") for key in style)
        if self._last is not None and self._last[0] == style and not has_tooltip:
            _, element = self._last
            element.set("d", element.get("d", "") + commands)
        elif len(style) > 1:
            self._last = (style, add(self._root, "path", d=commands, **style))

    def _reference(self) -> dict[str, str]:
        """Return the attribute that refers to the mark of the current artist; {} for none."""
        name = self._gids[-1].rpartition("/")[2]
        kind, _, reference = name.partition(" ")
        return {f"data-{kind}": reference.replace(" ", ",")} if reference else {}


def _style(gc: GraphicsContextBase, face: Any) -> dict[str, str]:
    """Return how a path is filled and drawn as SVG attributes; only fill="none" for an invisible one."""
    style = {"fill": "none"}
    opacity = gc.get_alpha() if gc.get_forced_alpha() else None
    line: Any = gc.get_rgb() if gc.get_linewidth() else None
    # Set fill and stroke, in the theme's colours where it has them
    for kind, colour in (("fill", face), ("stroke", line)):
        alpha = _alpha(colour, opacity)
        if not alpha:
            continue
        hexadecimal = to_hex(colour)
        style[kind] = _VARIABLES.get(hexadecimal, hexadecimal)
        if alpha < 1:
            style[f"{kind}-opacity"] = f"{alpha:g}"
    # Set the width and the dashes of the line
    if "stroke" in style:
        width = gc.get_linewidth()
        if width != 1:
            style["stroke-width"] = px(width)
        dashes: Any = gc.get_dashes()[1]
        if dashes:
            style["stroke-dasharray"] = " ".join(px(length) for length in dashes)
    return style


def _alpha(colour: Sequence[float] | None, opacity: float | None) -> float:
    """Return the opacity of a colour, RGB or RGBA, where no ``opacity`` overrides it; 0 for no colour."""
    if colour is None:
        return 0.0
    if opacity is not None:
        return opacity
    return float(colour[3]) if len(colour) > 3 else 1.0


def _commands(path: Path, clip: Bbox | None = None) -> str:
    """Return a path as SVG commands; lines are cut at the box ``clip``."""
    extents: Any = None if clip is None else clip.extents
    commands = ""
    for vertices, code in path.iter_segments(clip=extents, simplify=False):
        commands += _COMMANDS[code]
        if code != Path.CLOSEPOLY:
            commands += " ".join(px(value) for value in vertices)
    return commands


def _dust(dots: list[tuple[int, int]]) -> str:
    """Return a path of zero-length lines, each relative to the previous one, which is short if they are sorted."""
    path = ""
    left = 0
    top = 0
    for x, y in dots:
        separator = " " if y >= top else ""
        path += f"m{x - left}{separator}{y - top}z"
        left = x
        top = y
    return path


def draw_chart(chart: Chart) -> Markup:
    """Return the chart as an ``svg`` element."""
    if chart.heatmap is not None:
        return markup(draw_map(chart, chart.heatmap))
    with drawing():
        figure = draw(chart)
        figure.patch.set_visible(False)
        width, height = 72 * figure.get_size_inches()
        root = svg(chart, "chart", width, height)
        figure.draw(PageRenderer(root, width, height))
    return markup(root)


def draw_scale(measure: Measure) -> Markup:
    """Return the colour scale of a table's map."""
    scale = measure.scale
    quantity = f"{measure.title}, {measure.shown}"
    width = _LEFT + max(_SCALE, _LETTER * len(quantity)) + 24
    root = _scale_root("scale-t", f"Colour scale: {quantity}", width, 54.0)
    # Fill the bar with the gradient
    definitions = add(root, "defs")
    gradient = add(definitions, "linearGradient", id="cividis")
    for percent in range(0, 101, 10):
        colour, _ = cividis(percent / 100)
        add(gradient, "stop", offset=f"{percent}%", stop_color=colour)
    add(root, "rect", x=_LEFT, y=4, width=_SCALE, height=12, rx=2, fill="url(#cividis)")
    # Mark the ticks, and name the quantity
    ticks = []
    for value in scale.ticks:
        x = _LEFT + _SCALE * float(scale.fraction(value))
        ticks.append((x, scale.text(value)))
    lines = "".join(f"M{px(x)} 16v4" for x, _ in ticks)
    add(root, "path", class_="axis", d=lines)
    along(root, ticks, class_="tick", y=32, text_anchor="middle")
    add(root, "text", quantity, class_="tick", x=_LEFT, y=49)
    return markup(root)


def _scale_root(title_id: str, title: str, width: float, height: float) -> Element:
    """Return the ``svg`` element of a legend, with a title for screen readers."""
    root = Element("svg", {"class": "scale", "role": "img", "aria-labelledby": title_id})
    root.set("viewBox", f"0 0 {px(width)} {px(height)}")
    root.set("width", px(width))
    add(root, "title", title, id=title_id)
    return root


def draw_windows(layout: Layout) -> Markup:
    """Return the legend of a map of windows: each letter with its colour and what its heads see."""
    texts = _window_meanings(layout)
    longest = max(len(text) for text in texts.values())
    title = "; ".join(texts.values())
    root = _scale_root("windows-t", title, _SWATCH + _LETTER * longest, _SWATCH * len(texts))
    shades = window_shades(layout)
    for row, (letter, text) in enumerate(texts.items()):
        top = _SWATCH * row
        shade = round(shades[letter] * (SHADES - 1)) / (SHADES - 1)
        colour, _ = cividis(shade)
        add(root, "rect", x=0, y=top + 2, width=14, height=14, rx=2, fill=colour)
        add(root, "text", text, x=_SWATCH, y=top + 13)
    return markup(root)


def _window_meanings(layout: Layout) -> dict[str, str]:
    """Return what the heads of each letter see and how many they are, global ones first, then the widest window."""
    sinks = ""
    if layout.sinks:
        sinks = (
            " and the first token" if layout.sinks == 1 else f" and the first {layout.sinks} tokens"
        )
    meanings = {GLOBAL: f"{GLOBAL}: global, all earlier keys"}
    for letter, window in reversed(layout.legend.items()):
        meanings[letter] = f"{letter}: the last {window:,} keys{sinks}"
    texts = {}
    for letter, meaning in meanings.items():
        count = sum(row.count(letter) for row in layout.heads)
        texts[letter] = f"{meaning} ({count} heads)"
    return texts


def draw_map(chart: Chart, cells: Heatmap) -> Element:
    """Return a chart's cells with the names of its rows and columns."""
    sizes = _MapSizes.of(chart, cells)
    root = svg(chart, "map" if cells.written else "small", sizes.width, sizes.height)
    root.set("width", px(sizes.width if cells.written else 1.4 * sizes.width))
    # Draw the cells, with their values or the marks of a layout
    corner = f"{px(sizes.left)} {px(sizes.top)}"
    place = f"translate({corner}) scale({px(sizes.step)})"
    group = add(root, "g", class_="cells", transform=place)
    if cells.same_as:
        add(group, "use", href=f"#{cells.same_as}-cells")
    else:
        _draw_cells(add(group, "g", id=f"{chart.name}-cells"), cells)
    if cells.written:
        columns = len(cells.values[0])
        root.set("data-map", f"{columns} {px(sizes.step)} {corner}")
        root.set("height", px(sizes.height))
    else:
        _mark_chosen(group, cells)
    if cells.written or cells.letters:
        _write_values(add(root, "g", class_="values"), cells, sizes)
    # Write the names of columns and rows, each at the middle of a cell
    middle = _FILLED / 2
    columns_at = [
        (sizes.left + (value + middle) * sizes.step, text) for value, text in chart.x.ticks
    ]
    along(root, columns_at, class_="tick", y=sizes.height - 5, text_anchor="middle")
    x = sizes.left - 8 if cells.written else 14
    for value, text in chart.y.ticks:
        y = sizes.top + (value + middle) * sizes.step
        add(root, "text", text, class_="tick", x=x, y=y, dy=".35em", text_anchor="end")
    return root


@dataclass(frozen=True)
class _MapSizes:
    """Lengths of a map, in points."""

    step: float  # width and height of a cell
    left: float  # left edge of the cells
    top: float  # upper edge of the cells
    width: float  # width of the map
    height: float  # height of the map

    @classmethod
    def of(cls, chart: Chart, cells: Heatmap) -> "_MapSizes":
        """Fit a map to its cells: large ones are written into, small ones are a layout's picture."""
        columns = len(cells.values[0])
        rows = len(cells.values)
        if cells.written:
            step = float(min(48, max(26, _WIDEST // columns)))
            left = _LEFT
            top = 4.0
            foot = 20
        else:
            step = 18.0
            left = 20.0 if chart.y.ticks else 0.0
            top = 6.0
            foot = 18 if chart.x.ticks else 4
        width = left + columns * step + 4
        height = top + rows * step + foot
        return cls(step, left, top, width, height)


def _draw_cells(group: Element, cells: Heatmap) -> None:
    """Draw each cell as a short thick line, one path per shade; empty cells are left out."""
    group.set("transform", f"translate(0 {px(_FILLED / 2)})")
    group.set("stroke-width", px(_FILLED))
    length = px(_FILLED).removeprefix("0")
    paths: dict[str, str] = defaultdict(str)
    for row, values in enumerate(cells.values):
        for column, value in enumerate(values):
            if math.isnan(value):
                continue
            shade, _ = _look(cells, value)
            paths[shade] += f"M{column} {row}h{length}"
    for shade, path in paths.items():
        add(group, "path", d=path, stroke=shade)


def _write_values(group: Element, cells: Heatmap, sizes: _MapSizes) -> None:
    """Write the value or the letter of every cell, as one element per row and colour of text."""
    for row, values in enumerate(cells.values):
        texts: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for column, value in enumerate(values):
            if math.isnan(value):
                continue
            x = sizes.left + round((column + _FILLED / 2) * sizes.step)
            text = cells.letters[row][column] if cells.letters else cells.scale.text(value)
            _, ink_class = _look(cells, value)
            texts[ink_class].append((x, text))
        y = sizes.top + (row + _FILLED / 2) * sizes.step + 4
        for ink_class, line in texts.items():
            along(group, line, class_=ink_class, y=y)


def _mark_chosen(group: Element, cells: Heatmap) -> None:
    """Draw the outlines of the marked cells as one element, and their dots as one or two."""
    if not cells.chosen:
        return
    offset = px(_FILLED / 2 - 0.5)
    outlines = "".join(f"M{column} {row}h1v1h-1z" for row, column in cells.chosen)
    add(group, "path", class_="chosen", d=outlines, transform=f"translate({offset} {offset})")
    dots: dict[str, str] = defaultdict(str)
    for row, column in cells.chosen:
        _, ink_class = _look(cells, cells.values[row][column])
        dots[ink_class] += f"M{column} {row}h0"
    middle = px(_FILLED / 2)
    to_middle = f"translate({middle} {middle})"
    for ink_class, path in dots.items():
        add(group, "path", class_=f"dust {ink_class}", d=path, transform=to_middle)


def _look(cells: Heatmap, value: float) -> tuple[str, str]:
    """Return a value's shade, and the CSS class of text on it."""
    step = round(float(cells.scale.fraction(value)) * (SHADES - 1))
    shade, ink = cividis(step / (SHADES - 1))
    return shade, _ON[ink]


def svg(chart: Chart, kind: str, width: float, height: float) -> Element:
    """Return an ``svg`` element of a CSS class, with the chart's title and description for screen readers."""
    name = chart.name
    root = Element("svg", {"class": kind, "role": "img", "data-chart": name})
    root.set("aria-labelledby", f"{name}-t {name}-d")
    root.set("viewBox", f"0 0 {px(width)} {px(height)}")
    add(root, "title", chart.title, id=f"{name}-t")
    add(root, "desc", chart.words, id=f"{name}-d")
    return root


def add(parent: Element, tag: str, text: str | None = None, **attributes: str | float) -> Element:
    """Append a child element and return it: underscores in attributes become dashes, numbers are written as lengths."""
    child = ElementTree.SubElement(parent, tag)
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        child.set(name, value if isinstance(value, str) else px(value))
    child.text = text
    child.tail = "\n"
    return child


def along(parent: Element, texts: Iterable[tuple[float, str]], **attributes: str | float) -> None:
    """Append one ``text`` element with several texts, each at its own x; they share the attributes."""
    line = add(parent, "text", None, **attributes)
    for x, text in texts:
        add(line, "tspan", text, x=x).tail = None


def px(value: float) -> str:
    """Format a length in user units with one decimal, or two below 1."""
    if abs(value) < 1:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:.1f}".removesuffix(".0")


def markup(element: Element) -> Markup:
    """Return the element as markup, with its texts escaped."""
    return Markup(ElementTree.tostring(element, encoding="unicode"))
