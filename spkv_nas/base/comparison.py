"""Compare results by value, where a dataclass's own comparison fails on arrays and data frames."""

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
        arrays = np.asarray(first), np.asarray(second)
        has_missing = all(array.dtype.kind in "fc" for array in arrays)
        return arrays[0].dtype == arrays[1].dtype and np.array_equal(*arrays, equal_nan=has_missing)
    if hasattr(first, "equals") or hasattr(
        second, "equals"
    ):  # of pandas, which not every command imports
        return type(first) is type(second) and bool(first.equals(second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _is_equal(first[key], second[key]) for key in first
        )
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    is_missing = (
        isinstance(first, float)
        and isinstance(second, float)
        and first != first
        and second != second
    )
    return is_missing or bool(first == second)
