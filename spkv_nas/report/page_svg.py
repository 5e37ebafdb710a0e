"""Draw charts as inline SVG of the report page, in colours that follow its dark mode.

Charts are the figures of ``plot``. A mark with a tooltip refers to the page's data, ``data-mark="mark,index"``; a cloud
of dots, ``data-cloud="mark"``. Maps of heads are one path per shade, and small ones reuse the cells of the large one,
which keeps thousands of cells short.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
from markupsafe import Markup
from matplotlib.backend_bases import GraphicsContextBase, RendererBase
from matplotlib.colors import to_hex
from matplotlib.path import Path
from matplotlib.transforms import Affine2D, Bbox, Transform

from spkv_nas.artifacts.layout import GLOBAL, Layout
from spkv_nas.artifacts.score_kind import Measure
from spkv_nas.report.chart import Chart, Heatmap
from spkv_nas.report.density_charts import window_shades
from spkv_nas.report.plot import LETTER, SHADES, TONES, cividis, draw, drawing

_LEFT = 58.0  # from the left edge of a large map to its cells
_WIDEST = 1048  # greatest width of a map's cells on the page
_FILLED = 0.92  # painted share of a cell's width and height
_ON = {"#000": "on-light", "#fff": "on-dark"}  # CSS class of text on a shade
_SWATCH = 20.0  # height of a line of the legend of windows, and width of its colour
_SCALE = 220.0  # length of a colour scale
_LETTER = 6.5  # width of a letter below it
_VARIABLES = {colour: f"var(--{tone})" for tone, colour in TONES.items()} | {
    "#ffffff": "var(--card)"
}
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
        clip = self._clip(gc) if rgbFace is None else None
        self._path(
            _style(gc, rgbFace) | self._reference(),
            _commands(path.transformed(transform + self._flip), clip),
        )

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
        centres: Any = path.transformed(trans + self._flip).vertices
        codes: Any = shape.codes
        is_round = bool(np.isin(Path.CURVE4, codes))
        radius = shape.get_extents().width / 2
        reference = self._reference()
        clip = self._clip(gc)
        # Write dots without tooltips as one path, whose round line ends are the dots
        if is_round and "stroke" not in style and "data-mark" not in reference:
            dots = [(round(x), round(y)) for x, y in centres]
            shades = {
                key.replace("fill", "stroke"): value
                for key, value in style.items()
                if key.startswith("fill")
            }
            style = {"class": "dust", **shades, "stroke-width": px(2 * radius), **reference}
            self._path(style, _dust(dots if reference else sorted(dots)))
            return
        # Write other marks one by one, in a group that has their style
        group = self._root
        if is_round or reference:
            group = add(self._root, "g", **style)
            self._last = None
        for index, (x, y) in enumerate(centres):
            each = {key: f"{value},{index}" for key, value in reference.items()}
            mark = Affine2D().translate(x, y)
            if is_round:
                add(group, "circle", cx=x, cy=y, r=radius, **each)
            elif each:
                add(group, "path", d=_commands(shape.transformed(mark)), **each)
            elif clip is None or clip.overlaps(shape.get_extents(mark)):
                self._path(style, _commands(shape.transformed(mark)))

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
        across = mtext.get_transform().transform(mtext.get_unitless_position())
        x, y = (x, self._flip.transform(across)[1]) if angle else (across[0], y)
        size = prop.get_size_in_points()
        anchor = {"center": "middle", "right": "end"}.get(mtext.get_ha())
        attributes: dict[str, Any] = {"text_anchor": anchor} if anchor else {}
        attributes |= (
            {"transform": f"translate({px(x)} {px(y)}) rotate(-{angle:g})"}
            if angle
            else {"x": x, "y": y}
        )
        attributes |= {"class": "tick"} if to_hex(gc.get_rgb()) == TONES["muted"] else {}
        add(self._root, "text", s, **attributes, **({} if size == 12 else {"font_size": size}))
        self._last = None

    def _clip(self, gc: GraphicsContextBase) -> Bbox | None:
        """Return the box beyond which nothing is drawn."""
        box = gc.get_clip_rectangle()
        height = self._size[1]
        return (
            None
            if box is None
            else Bbox.from_extents(box.x0, height - box.y1, box.x1, height - box.y0)
        )

    def _path(self, style: dict[str, str], commands: str) -> None:
        """Append a path, to the last element if that has the same style and no tooltip."""
        if (
            self._last is not None
            and self._last[0] == style
            and not any(key.startswith("data") for key in style)
        ):
            self._last[1].set("d", self._last[1].get("d", "") + commands)
        elif len(style) > 1:
            self._last = style, add(self._root, "path", d=commands, **style)

    def _reference(self) -> dict[str, str]:
        """Return the attribute that refers to the mark of the current artist; {} for none."""
        kind, _, reference = self._gids[-1].rpartition("/")[2].partition(" ")
        return {f"data-{kind}": reference.replace(" ", ",")} if reference else {}


def _style(gc: GraphicsContextBase, face: Any) -> dict[str, str]:
    """Return how a path is filled and drawn as SVG attributes; only fill="none" for an invisible one."""
    style = {"fill": "none"}
    opacity = gc.get_alpha() if gc.get_forced_alpha() else None
    line: Any = gc.get_rgb() if gc.get_linewidth() else None
    # Set fill and stroke, in the theme's colours where it has them
    for kind, colour in (("fill", face), ("stroke", line)):
        alpha = 0.0 if colour is None else opacity if opacity is not None else (*colour, 1.0)[3]
        if not alpha:
            continue
        style[kind] = _VARIABLES.get(to_hex(colour), to_hex(colour))
        style |= {f"{kind}-opacity": f"{alpha:g}"} if alpha < 1 else {}
    # Set the width and the dashes of the line
    if "stroke" in style:
        style |= {"stroke-width": px(gc.get_linewidth())} if gc.get_linewidth() != 1 else {}
        dashes: Any = gc.get_dashes()[1]
        style |= {"stroke-dasharray": " ".join(map(px, dashes))} if dashes else {}
    return style


def _commands(path: Path, clip: Bbox | None = None) -> str:
    """Return a path as SVG commands; lines are cut at the box ``clip``."""
    segments: Any = path.iter_segments(clip=None if clip is None else clip.extents, simplify=False)
    return "".join(
        _COMMANDS[code] + ("" if code == Path.CLOSEPOLY else " ".join(map(px, vertices)))
        for vertices, code in segments
    )


def _dust(dots: list[tuple[int, int]]) -> str:
    """Return a path of zero-length lines, each relative to the previous one, which is short if they are sorted."""
    path, (left, top) = "", (0, 0)
    for x, y in dots:
        path += f"m{x - left}{' ' if y >= top else ''}{y - top}z"
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
    width = px(_LEFT + max(_SCALE, _LETTER * len(quantity)) + 24)
    sizes = {"viewBox": f"0 0 {width} 54", "width": width}
    root = Element("svg", {"class": "scale", "role": "img", "aria-labelledby": "scale-t", **sizes})
    add(root, "title", f"Colour scale: {quantity}", id="scale-t")
    # Fill the bar with the gradient
    shades = add(add(root, "defs"), "linearGradient", id="cividis")
    for percent in range(0, 101, 10):
        add(shades, "stop", offset=f"{percent}%", stop_color=cividis(percent / 100)[0])
    add(root, "rect", x=_LEFT, y=4, width=_SCALE, height=12, rx=2, fill="url(#cividis)")
    # Mark the ticks, and name the quantity
    ticks = [
        (_LEFT + _SCALE * float(scale.fraction(value)), scale.text(value)) for value in scale.ticks
    ]
    add(root, "path", class_="axis", d="".join(f"M{px(x)} 16v4" for x, _ in ticks))
    along(root, ticks, class_="tick", y=32, text_anchor="middle")
    add(root, "text", quantity, class_="tick", x=_LEFT, y=49)
    return markup(root)


def draw_windows(layout: Layout) -> Markup:
    """Return the legend of a map of windows: each letter with its colour and what its heads see."""
    meanings = {
        letter: f"{letter}: the last {window:,} keys" for letter, window in layout.legend.items()
    }
    meanings = {GLOBAL: f"{GLOBAL}: global, all earlier keys"} | dict(reversed(meanings.items()))
    if layout.sinks:
        tokens = "token" if layout.sinks == 1 else f"{layout.sinks} tokens"
        meanings = {
            letter: f"{meaning} and the first {tokens}" if letter != GLOBAL else meaning
            for letter, meaning in meanings.items()
        }
    counts = {letter: sum(row.count(letter) for row in layout.heads) for letter in meanings}
    texts = {letter: f"{meaning} ({counts[letter]} heads)" for letter, meaning in meanings.items()}
    width = px(_SWATCH + _LETTER * max(map(len, texts.values())))
    height = px(_SWATCH * len(texts))
    root = Element("svg", {"class": "scale", "role": "img", "aria-labelledby": "windows-t"})
    root.set("viewBox", f"0 0 {width} {height}")
    root.set("width", width)
    add(root, "title", "; ".join(texts.values()), id="windows-t")
    shades = window_shades(layout)
    for row, (letter, text) in enumerate(texts.items()):
        shade = round(shades[letter] * (SHADES - 1)) / (SHADES - 1)
        add(
            root,
            "rect",
            x=0,
            y=_SWATCH * row + 2,
            width=14,
            height=14,
            rx=2,
            fill=cividis(shade)[0],
        )
        add(root, "text", text, x=_SWATCH, y=_SWATCH * row + 13)
    return markup(root)


def draw_map(chart: Chart, cells: Heatmap) -> Element:
    """Return a chart's cells with the names of its rows and columns."""
    # Sizes
    columns = len(cells.values[0])
    rows = len(cells.values)
    step = float(min(48, max(26, _WIDEST // columns))) if cells.written else 18.0
    left, top = (_LEFT, 4.0) if cells.written else (20.0 if chart.y.ticks else 0.0, 6.0)
    foot = 20 if cells.written else 18 if chart.x.ticks else 4
    width = left + columns * step + 4
    height = top + rows * step + foot
    root = svg(chart, "map" if cells.written else "small", width, height)
    root.set("width", px(width if cells.written else 1.4 * width))
    # Cells, with their values or the marks of a layout
    group = add(
        root, "g", class_="cells", transform=f"translate({px(left)} {px(top)}) scale({px(step)})"
    )
    if cells.same_as:
        add(group, "use", href=f"#{cells.same_as}-cells")
    else:
        _draw_cells(add(group, "g", id=f"{chart.name}-cells"), cells)
    if cells.written:
        root.set("data-map", f"{columns} {px(step)} {px(left)} {px(top)}")
        root.set("height", px(height))
    else:
        _mark_chosen(group, cells)
    if cells.written or cells.letters:
        _write_values(add(root, "g", class_="values"), cells, step, left, top)
    # Names of columns and rows
    columns_at = [(left + (value + _FILLED / 2) * step, text) for value, text in chart.x.ticks]
    along(root, columns_at, class_="tick", y=height - 5, text_anchor="middle")
    for value, text in chart.y.ticks:
        y = top + (value + _FILLED / 2) * step
        add(
            root,
            "text",
            text,
            class_="tick",
            x=left - 8 if cells.written else 14,
            y=y,
            dy=".35em",
            text_anchor="end",
        )
    return root


def _draw_cells(group: Element, cells: Heatmap) -> None:
    """Draw each cell as a short thick line, one path per shade; empty cells are left out."""
    group.set("transform", f"translate(0 {px(_FILLED / 2)})")
    group.set("stroke-width", px(_FILLED))
    shades: dict[str, str] = defaultdict(str)
    for row, values in enumerate(cells.values):
        for column, value in enumerate(values):
            if not math.isnan(value):
                shades[_look(cells, value)[0]] += f"M{column} {row}h{px(_FILLED).removeprefix('0')}"
    for shade, path in shades.items():
        add(group, "path", d=path, stroke=shade)


def _write_values(group: Element, cells: Heatmap, step: float, left: float, top: float) -> None:
    """Write the value or the letter of every cell."""
    for row, values in enumerate(cells.values):
        lines: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for column, value in enumerate(values):
            if not math.isnan(value):
                x = left + round((column + _FILLED / 2) * step)
                text = cells.letters[row][column] if cells.letters else cells.scale.text(value)
                lines[_look(cells, value)[1]].append((x, text))
        for ink_class, texts in lines.items():
            along(group, texts, class_=ink_class, y=top + (row + _FILLED / 2) * step + 4)


def _mark_chosen(group: Element, cells: Heatmap) -> None:
    """Draw the outlines of the marked cells as one element, and their dots as one or two."""
    if not cells.chosen:
        return
    offset = px(_FILLED / 2 - 0.5)
    outlines = "".join(f"M{column} {row}h1v1h-1z" for row, column in cells.chosen)
    add(group, "path", class_="chosen", d=outlines, transform=f"translate({offset} {offset})")
    dots: dict[str, str] = defaultdict(str)
    for row, column in cells.chosen:
        dots[_look(cells, cells.values[row][column])[1]] += f"M{column} {row}h0"
    middle = px(_FILLED / 2)
    for ink_class, path in dots.items():
        add(
            group,
            "path",
            class_=f"dust {ink_class}",
            d=path,
            transform=f"translate({middle} {middle})",
        )


def _look(cells: Heatmap, value: float) -> tuple[str, str]:
    """Return a value's shade, and the CSS class of text on it."""
    fill, ink = cividis(round(float(cells.scale.fraction(value)) * (SHADES - 1)) / (SHADES - 1))
    return fill, _ON[ink]


def svg(chart: Chart, kind: str, width: float, height: float) -> Element:
    """Return an ``svg`` element of a CSS class, with the chart's title and description for screen readers."""
    root = Element("svg", {"class": kind, "role": "img", "data-chart": chart.name})
    root.set("aria-labelledby", f"{chart.name}-t {chart.name}-d")
    root.set("viewBox", f"0 0 {px(width)} {px(height)}")
    add(root, "title", chart.title, id=f"{chart.name}-t")
    add(root, "desc", chart.words, id=f"{chart.name}-d")
    return root


def add(parent: Element, tag: str, text: str | None = None, **attributes: Any) -> Element:
    """Append a child element and return it: underscores in attributes become dashes, numbers are written as lengths."""
    child = ElementTree.SubElement(parent, tag)
    for key, value in attributes.items():
        child.set(key.rstrip("_").replace("_", "-"), value if isinstance(value, str) else px(value))
    child.text = text
    child.tail = "\n"
    return child


def along(parent: Element, texts: Iterable[tuple[float, str]], **attributes: Any) -> None:
    """Append one ``text`` element with several texts, each at its own x; they share the attributes."""
    line = add(parent, "text", **attributes)
    for x, text in texts:
        add(line, "tspan", text, x=x).tail = None


def px(value: float) -> str:
    """Format a length in user units with one decimal, or two below 1."""
    return (
        f"{value:.2f}".rstrip("0").rstrip(".")
        if abs(value) < 1
        else f"{value:.1f}".removesuffix(".0")
    )


def markup(element: Element) -> Markup:
    """Return the element as markup, with its texts escaped."""
    return Markup(ElementTree.tostring(element, encoding="unicode"))
