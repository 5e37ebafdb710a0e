"""Mark parameters of tests as slow, and combine parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*lists: Sequence[Any]) -> list[Any]:
    """Combine lists of parameters in few rows, such that every pair of values of two lists occurs in one.

    Parameters of independent axes need no more: what goes wrong at all nearly always takes one or two of them.
    """
    columns = [
        [
            value if hasattr(value, "marks") else pytest.param(value, id=str(value))
            for value in values
        ]
        for values in lists
    ]
    # Choose the row with the most pairs that are missing, the first of several, until none is
    rows = {
        row: set(combinations(enumerate(row), 2))
        for row in product(*(range(len(values)) for values in lists))
    }
    missing, chosen = set().union(*rows.values()), []
    while missing:
        row = max(rows, key=lambda row: len(rows[row] & missing))
        missing -= rows[row]
        chosen.append([columns[axis][index] for axis, index in enumerate(row)])
    return [
        pytest.param(
            *(v for part in parts for v in part.values), id="-".join(str(part.id) for part in parts)
        )
        for parts in chosen
    ]


def slow_after(number: int, values: Iterable[Any]) -> list[Any]:
    """Mark all but the first ``number`` parameters slow; a tuple holds one value per argument name."""
    return [value if index < number else slow(value) for index, value in enumerate(values)]


def slow(value: Any) -> Any:
    """Mark one parameter slow."""
    if hasattr(value, "marks"):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
