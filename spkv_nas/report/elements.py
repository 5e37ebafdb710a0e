"""Create SVG elements: lengths rounded, attribute names from Python's, text escaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from markupsafe import Markup

from spkv_nas.report.chart import Chart


def svg(chart: Chart, kind: str, width: float, height: float) -> Element:
    """Return an ``svg`` element that carries the chart's title and description for screen readers.

    Args:
        chart: named in ``data-chart``.
        kind: CSS class.
        width: of the view box, in user units.
        height: of the view box, in user units.
    """
    root = Element("svg", {"class": kind, "role": "img", "data-chart": chart.name})
    root.set("aria-labelledby", f"{chart.name}-t {chart.name}-d")
    root.set("viewBox", f"0 0 {px(width)} {px(height)}")
    add(root, "title", chart.title, id=f"{chart.name}-t")
    add(root, "desc", chart.words, id=f"{chart.name}-d")
    return root


def add(parent: Element, tag: str, text: str | None = None, **attributes: Any) -> Element:
    """Append a child element and return it.

    Args:
        parent: element to extend.
        tag: name of the child.
        text: its text.
        attributes: attributes of it; underscores become dashes, numbers are written as lengths.
    """
    child = ElementTree.SubElement(parent, tag)
    for key, value in attributes.items():
        child.set(key.rstrip("_").replace("_", "-"), value if isinstance(value, str) else px(value))
    child.text, child.tail = text, "\n"
    return child


def along(parent: Element, texts: Iterable[tuple[float, str]], **attributes: Any) -> None:
    """Append one ``text`` element with several texts, each at its own x; they share the attributes."""
    line = add(parent, "text", **attributes)
    for x, text in texts:
        add(line, "tspan", text, x=x).tail = None


def px(value: float) -> str:
    """Format a length in user units with one decimal, or two below 1."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 1 else f"{value:.1f}".removesuffix(".0")


def markup(element: Element) -> Markup:
    """Return the element as markup, with its texts escaped."""
    return Markup(ElementTree.tostring(element, encoding="unicode"))
