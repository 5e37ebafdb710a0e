"""Mark parameters of tests as slow, and combine parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def pairwise(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[Any]:
    """Combine three lists of parameters so that every pair of values of two lists occurs, the longest lists first.

    Each value of the first list comes with each of the second, and with one of the third.
    """
    rows = [
        [value if hasattr(value, "marks") else pytest.param(value, id=str(value)) for value in row]
        for row in (first, second, third)
    ]
    combined = [
        (one, two, rows[2][(i + j) % len(third)]) for i, one in enumerate(rows[0]) for j, two in enumerate(rows[1])
    ]
    return [
        pytest.param(*(v for part in parts for v in part.values), id="-".join(str(part.id) for part in parts))
        for parts in combined
    ]


def slow_after(number: int, values: Iterable[Any]) -> list[Any]:
    """Mark all but the first ``number`` parameters slow; a tuple holds one value per argument name."""
    return [value if index < number else slow(value) for index, value in enumerate(values)]


def slow(value: Any) -> Any:
    """Mark one parameter slow."""
    if hasattr(value, "marks"):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
