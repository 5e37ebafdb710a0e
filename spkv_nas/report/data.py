"""The numbers behind a page's charts, for its script and for whoever reads the page with a program: one JSON text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from spkv_nas.report.chart import Chart, Mark, Points

_NOT_DATA = {"name", "description", "note", "heading", "width", "height"}  # of a chart: text of the page, or layout


def page_data(
    charts: Iterable[Chart],
    instrument: Mapping[str, Any] | None = None,
    places: Mapping[str, int] | None = None,
) -> str:
    """``{"charts": {name: {title, x, y, marks}}, "instrument": ...}``, charts in data coordinates; cannot end the
    element that it stands in.

    Of charts what has its default value is left out, and the places of points that say nothing when pointed at, or say
    where they are: of heads by domain. Numbers are whole or have five significant digits, NaN is null.
    Layouts that points stand for are their places among those of the instrument, -1 where there is none.
    """

    def of_chart(chart: Chart) -> dict[str, Any]:
        content = {key: value for key, value in _plain(chart).items() if key not in _NOT_DATA}
        for mark in content["marks"]:
            if "layouts" in mark:
                mark["layouts"] = [(places or {}).get(name, -1) for name in mark["layouts"]]
        return content

    content = {"charts": {chart.name: of_chart(chart) for chart in charts}, "instrument": instrument}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _plain(value: Any) -> Any:
    """Dataclasses as mappings; marks say their kind."""
    if is_dataclass(value):
        kind = {"kind": type(value).__name__.lower()} if isinstance(value, Mark) else {}
        given = {field.name: getattr(value, field.name) for field in fields(value)}
        usual = {field.name: field.default for field in fields(value)}
        if isinstance(value, Points) and (value.form or not (value.tips or value.names)):
            usual |= {"x": value.x, "y": value.y}
        return kind | {name: _plain(content) for name, content in given.items() if content != usual[name]}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):  # which JSON has no word for
            return None
        return int(value) if value == round(value) else float(f"{value:.5g}")
    return value
