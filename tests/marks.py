"""Mark parameters of tests as slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(number: int, values: Iterable[Any]) -> list[Any]:
    """Mark all but the first ``number`` parameters slow; a tuple holds one value per argument name."""
    return [value if index < number else slow(value) for index, value in enumerate(values)]


def slow(value: Any) -> Any:
    """Mark one parameter slow."""
    if hasattr(value, "marks"):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
