"""Compare results by value, where a dataclass's own comparison fails on arrays and data frames."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np


class ComparedByValue:
    """Base class of dataclasses (``eq=False``) with arrays or data frames, whose ``==`` is true for equal contents.

    Missing numbers equal each other. Such results have no hash, as their contents may change.
    """

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` is of the same class, and all fields that are compared hold equal values."""
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in fields(self) if field.compare]  # type: ignore[arg-type]
        return all(_is_equal(getattr(self, name), getattr(other, name)) for name in names)


def _is_equal(first: Any, second: Any) -> bool:
    """Return whether two values are equal, inside containers too; NaN equals NaN."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return _are_equal_arrays(np.asarray(first), np.asarray(second))
    # Tables of pandas, which not every command imports
    if hasattr(first, "equals") or hasattr(second, "equals"):
        return type(first) is type(second) and bool(first.equals(second))
    if isinstance(first, dict) and isinstance(second, dict):
        return _are_equal_dicts(first, second)
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    return bool(first == second)


def _are_equal_dicts(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> bool:
    """Return whether two mappings have equal keys and values."""
    if first.keys() != second.keys():
        return False
    return all(_is_equal(value, second[key]) for key, value in first.items())


def _are_equal_arrays(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether two arrays have equal dtypes and values; NaN equals NaN."""
    if first.dtype != second.dtype:
        return False
    may_have_nan = first.dtype.kind in "fc"
    return np.array_equal(first, second, equal_nan=may_have_nan)
