"""Elements of SVG, made one way: lengths short, names of attributes from Python's, text escaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from markupsafe import Markup

from spkv_nas.report.chart import Chart


def svg(chart: Chart, kind: str, width: float, height: float) -> Element:
    """An ``svg`` element with the chart's title and description for who cannot see it."""
    made = Element("svg", {"class": kind, "role": "img", "data-chart": chart.name})
    made.set("aria-labelledby", f"{chart.name}-t {chart.name}-d")
    made.set("viewBox", f"0 0 {px(width)} {px(height)}")
    add(made, "title", chart.title, id=f"{chart.name}-t")
    add(made, "desc", chart.description, id=f"{chart.name}-d")
    return made


def add(parent: Element, tag: str, text: str | None = None, **attributes: Any) -> Element:
    """A child element, on a line of its own; underscores in attributes stand for dashes, numbers are lengths."""
    child = ElementTree.SubElement(parent, tag)
    for key, value in attributes.items():
        child.set(key.rstrip("_").replace("_", "-"), value if isinstance(value, str) else px(value))
    child.text, child.tail = text, "\n"
    return child


def along(parent: Element, texts: Iterable[tuple[float, str]], **attributes: Any) -> None:
    """Texts on one line, each at its x; the attributes are those of all."""
    line = add(parent, "text", **attributes)
    for x, text in texts:
        add(line, "tspan", text, x=x).tail = None


def px(value: float) -> str:
    """A length in user units, to a tenth, or below 1 to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 1 else f"{value:.1f}".removesuffix(".0")


def markup(element: Element) -> Markup:
    """The element as markup: escaped, so that no text in it acts."""
    return Markup(ElementTree.tostring(element, encoding="unicode"))
