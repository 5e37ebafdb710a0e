"""Embed the numbers behind a page's charts as one JSON text, for its script and for programs that read the page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from spkv_nas.report.chart import Chart, Mark, Points

_NOT_DATA = {"name", "description", "note", "heading", "width", "height"}  # fields of a chart that hold text or sizes


def page_data(
    charts: Iterable[Chart],
    explorer: Mapping[str, Any] | None = None,
    indices: Mapping[str, int] | None = None,
) -> str:
    """Return the page's data as JSON: ``{"charts": {name: {title, x, y, marks}}, "explorer": ...}``.

    Charts are in data coordinates. Fields with their default value are omitted, and so are the coordinates of points
    without tips or names, and of points whose tips share a ``form``. Numbers are integers or have five significant
    digits; NaN is null. The text contains no ``<``, so it cannot close the element that holds it.

    Args:
        charts: charts to embed.
        explorer: data of the layout explorer, if the page has one.
        indices: index of each layout among the explorer's, by name; points that stand for layouts refer to it, with -1
            for a name that it lacks.
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
