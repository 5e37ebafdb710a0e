"""Draw charts as inline SVG of the report page: the figures of ``plot``, in colours that follow the page's dark mode.

A mark with a tooltip refers to the page's data: ``data-mark="mark,index"``. Many dots that stand for layouts are one
element, which refers to its mark: ``data-cloud="mark"``. The page's script adds the tooltips of heatmap cells.
"""

from __future__ import annotations

from typing import Any
from xml.etree.ElementTree import Element

import numpy as np
from markupsafe import Markup
from matplotlib.backend_bases import GraphicsContextBase, RendererBase
from matplotlib.colors import to_hex
from matplotlib.path import Path
from matplotlib.transforms import Affine2D, Bbox, Transform

from spkv_nas.artifacts.score_kind import Measure
from spkv_nas.report.chart import Chart
from spkv_nas.report.colours import TONES, cividis
from spkv_nas.report.names import LETTER
from spkv_nas.report.plot import draw, drawing
from spkv_nas.report.svg_maps import LEFT, add, along, draw_map, markup, px, svg

_SCALE = 220.0  # length of a colour scale
_VARIABLES = {colour: f"var(--{tone})" for tone, colour in TONES.items()} | {"#ffffff": "var(--card)"}
_COMMANDS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "z"}


class PageRenderer(RendererBase):
    """Write a figure as SVG elements without styles or ids; lengths are points, y downward."""

    def __init__(self, root: Element, width: float, height: float) -> None:
        """Append to ``root``, an ``svg`` element of the figure's size."""
        super().__init__()
        self._root, self._size, self._gids = root, (width, height), [""]
        self._flip = Affine2D().scale(1, -1).translate(0, height)
        self._last: tuple[dict[str, str], Element] | None = None

    def get_canvas_width_height(self) -> tuple[float, float]:
        """Return the size in points."""
        return self._size

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
        """Estimate a text's extent: the page's fonts are not known here."""
        size = prop.get_size_in_points()
        return LETTER / 12 * size * len(s), size, 0.2 * size

    def open_group(self, s: str, gid: str | None = None) -> None:
        """Remember an artist's id, which refers to the page's data."""
        self._gids.append(gid or "")

    def close_group(self, s: str) -> None:
        """Forget it."""
        self._gids.pop()

    def draw_path(self, gc: GraphicsContextBase, path: Path, transform: Transform, rgbFace: Any = None) -> None:
        """Write a path; consecutive ones of one style are one element, unless they have a tooltip."""
        clip = self._clip(gc) if rgbFace is None else None
        self._path(_style(gc, rgbFace) | self._reference(), _commands(path.transformed(transform + self._flip), clip))

    def draw_markers(
        self,
        gc: GraphicsContextBase,
        marker_path: Path,
        marker_trans: Transform,
        path: Path,
        trans: Transform,
        rgbFace: Any = None,
    ) -> None:
        """Write a mark at every vertex: one by one if they have tooltips, dots without as one path."""
        # Find the shape, the style and the centres
        shape, style = marker_path.transformed(marker_trans + Affine2D().scale(1, -1)), _style(gc, rgbFace)
        centres: Any = path.transformed(trans + self._flip).vertices
        codes: Any = shape.codes
        is_round, radius = bool(np.isin(Path.CURVE4, codes)), shape.get_extents().width / 2
        reference, clip = self._reference(), self._clip(gc)
        # Write dots without tooltips as one path, whose round line ends are the dots
        if is_round and "stroke" not in style and "data-mark" not in reference:
            dots = [(round(x), round(y)) for x, y in centres]
            shades = {key.replace("fill", "stroke"): value for key, value in style.items() if key.startswith("fill")}
            style = {"class": "dust", **shades, "stroke-width": px(2 * radius), **reference}
            self._path(style, _dust(dots if reference else sorted(dots)))
            return
        # Write other marks one by one, in a group that has their style
        group = self._root
        if is_round or reference:
            group, self._last = add(self._root, "g", **style), None
        for index, (x, y) in enumerate(centres):
            each, mark = {key: f"{value},{index}" for key, value in reference.items()}, Affine2D().translate(x, y)
            if is_round:
                add(group, "circle", cx=x, cy=y, r=radius, **each)
            elif each:
                add(group, "path", d=_commands(shape.transformed(mark)), **each)
            elif clip is None or clip.overlaps(shape.get_extents(mark)):
                self._path(style, _commands(shape.transformed(mark)))

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
    ) -> None:
        """Write a text at its anchor, as its width is only estimated."""
        across = mtext.get_transform().transform(mtext.get_unitless_position())
        x, y = (x, self._flip.transform(across)[1]) if angle else (across[0], y)
        size, anchor = prop.get_size_in_points(), {"center": "middle", "right": "end"}.get(mtext.get_ha())
        attributes: dict[str, Any] = {"text_anchor": anchor} if anchor else {}
        attributes |= {"transform": f"translate({px(x)} {px(y)}) rotate(-{angle:g})"} if angle else {"x": x, "y": y}
        attributes |= {"class": "tick"} if to_hex(gc.get_rgb()) == TONES["muted"] else {}
        add(self._root, "text", s, **attributes, **({} if size == 12 else {"font_size": size}))
        self._last = None

    def _clip(self, gc: GraphicsContextBase) -> Bbox | None:
        """Return the box beyond which nothing is drawn."""
        box, height = gc.get_clip_rectangle(), self._size[1]
        return None if box is None else Bbox.from_extents(box.x0, height - box.y1, box.x1, height - box.y0)

    def _path(self, style: dict[str, str], commands: str) -> None:
        """Append a path, to the last element if that has the same style and no tooltip."""
        if self._last is not None and self._last[0] == style and not any(key.startswith("data") for key in style):
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
        _COMMANDS[code] + ("" if code == Path.CLOSEPOLY else " ".join(map(px, vertices))) for vertices, code in segments
    )


def _dust(dots: list[tuple[int, int]]) -> str:
    """Return a path of zero-length lines, each relative to the previous one, which is short if they are sorted."""
    path, (left, top) = "", (0, 0)
    for x, y in dots:
        path += f"m{x - left}{' ' if y >= top else ''}{y - top}z"
        left, top = x, y
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
    scale, quantity = measure.scale, f"{measure.title}, {measure.shown}"
    root = Element("svg", {"class": "scale", "role": "img", "aria-labelledby": "scale-t"})
    add(root, "title", f"Colour scale: {quantity}", id="scale-t")
    width = LEFT + _SCALE + 24
    root.set("viewBox", f"0 0 {px(width)} 54")
    root.set("width", px(width))
    # Fill the bar with the gradient
    shades = add(add(root, "defs"), "linearGradient", id="cividis")
    for percent in range(0, 101, 10):
        add(shades, "stop", offset=f"{percent}%", stop_color=cividis(percent / 100)[0])
    add(root, "rect", x=LEFT, y=4, width=_SCALE, height=12, rx=2, fill="url(#cividis)")
    # Mark the ticks, and name the quantity
    ticks = [(LEFT + _SCALE * float(scale.fraction(value)), scale.text(value)) for value in scale.ticks]
    add(root, "path", class_="axis", d="".join(f"M{px(x)} 16v4" for x, _ in ticks))
    along(root, ticks, class_="tick", y=32, text_anchor="middle")
    add(root, "text", quantity, class_="tick", x=LEFT, y=49)
    return markup(root)
