"""Write self-contained HTML files from the templates in this folder: the data behind the charts, and the index.

The template engine escapes everything that comes from users; scripts and styles are allowed by their hashes only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from spkv_nas.report.chart import Chart, Mark, Points
from spkv_nas.report.formatting import capitalized
from spkv_nas.report.page_svg import draw_chart, draw_scale

_NOT_DATA = {"name", "description", "note", "heading", "width", "height"}  # fields of a chart that hold text or sizes


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template with the given values."""
    options: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), **options)
    environment.filters.update(compact=compact, csp_hash=_csp_hash, tie=_tie, cap=capitalized)
    environment.filters.update(draw=draw_chart, draw_scale=draw_scale)
    return environment.get_template(template).render(**values)


def compact(text: str) -> str:
    """Strip comments and indentation from a script or style, whose own strings contain neither."""
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def _tie(sentence: str) -> str:
    """Replace the spaces before percent signs and around ± and = by no-break spaces."""
    for sign in (" %", " ± ", " = "):
        sentence = sentence.replace(sign, sign.replace(" ", "\N{NO-BREAK SPACE}"))
    return sentence


def _csp_hash(content: str) -> str:
    """Return the Content-Security-Policy source that allows an inline style or script with this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def page_data(
    charts: Iterable[Chart], explorer: Mapping[str, Any] | None = None, indices: Mapping[str, int] | None = None
) -> str:
    """Return the page's data as JSON: ``{"charts": {name: {title, x, y, marks}}, "explorer": ...}``.

    Charts are in data coordinates. Fields with their default value are omitted, and so are the coordinates of points
    without tips or names, and of points whose tips share a ``form``. Numbers are integers or have five significant
    digits; NaN is null. The text contains no ``<``, so it cannot close the element that holds it. ``indices`` are the
    explorer's layouts by name: points that stand for layouts refer to them, with -1 for a name that it lacks.
    """

    def chart_content(chart: Chart) -> dict[str, Any]:
        content = {key: value for key, value in _plain(chart).items() if key not in _NOT_DATA}
        for mark in content["marks"]:
            if "layouts" in mark:
                mark["layouts"] = [(indices or {}).get(name, -1) for name in mark["layouts"]]
        return content

    content = {"charts": {chart.name: chart_content(chart) for chart in charts}, "explorer": explorer}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _plain(value: Any) -> Any:
    """Convert a value to types of JSON; dataclasses become mappings without default values, marks name their kind."""
    if is_dataclass(value):
        kind = {"kind": type(value).__name__.lower()} if isinstance(value, Mark) else {}
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        defaults = {field.name: field.default for field in fields(value)}
        # Omit coordinates that the page does not need
        if isinstance(value, Points) and (value.form or not (value.tips or value.names)):
            defaults |= {"x": value.x, "y": value.y}
        return kind | {name: _plain(content) for name, content in values.items() if content != defaults[name]}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):  # JSON has no NaN or infinity
            return None
        return int(value) if value == round(value) else float(f"{value:.5g}")
    return value
