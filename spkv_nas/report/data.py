"""The numbers behind a page's charts, for its script and for whoever reads the page with a program: one JSON text."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from spkv_nas.report.chart import Chart, Mark

_LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
_NOT_DATA = {"name", "description", "note", "heading", "width", "height"}  # of a chart: text of the page, or layout


def page_data(charts: Iterable[Chart], instrument: Mapping[str, Any] | None = None) -> str:
    """``{"charts": {name: {title, x, y, marks}}, "instrument": ...}``, charts in data coordinates; cannot end the
    element that it stands in.

    Of charts what has its default value is left out; numbers are whole or have five significant digits, NaN is null.
    """
    content = {
        chart.name: {key: value for key, value in _plain(chart).items() if key not in _NOT_DATA} for chart in charts
    }
    text = json.dumps(
        {"charts": content, "instrument": instrument}, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    return text.replace("<", "\\u003c")


def packed(numbers: Iterable[int]) -> tuple[int, int, str]:
    """(letters of each, lowest, text): whole numbers above the lowest, to the base 64, in the alphabet of base64url.

    Half the length of JSON; the page's script unpacks them.
    """
    listed = list(numbers)
    low, width = min(listed, default=0), 1
    while max(listed, default=0) - low >= 64**width:
        width += 1
    digits = (_LETTERS[(number - low) // 64**place % 64] for number in listed for place in reversed(range(width)))
    return width, low, "".join(digits)


def _plain(value: Any) -> Any:
    """Dataclasses as mappings; marks say their kind."""
    if is_dataclass(value):
        kind = {"kind": type(value).__name__.lower()} if isinstance(value, Mark) else {}
        given = {field.name: getattr(value, field.name) for field in fields(value)}
        usual = {field.name: field.default for field in fields(value)}
        return kind | {name: _plain(content) for name, content in given.items() if content != usual[name]}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):  # which JSON has no word for
            return None
        return int(value) if value == round(value) else float(f"{value:.5g}")
    return value
