"""Strict reader of ``.npz`` files, as ``base.tables`` has one for CSV.

The module of a file format declares its arrays once, as ``Array`` values: kind, shape and the range that is safe to
index, divide and take logarithms with. The checksum of zip detects a flipped bit, but not an array of another run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_npz
from spkv_nas.base.limits import MAX_WHOLE


@dataclass(frozen=True)
class Array:
    """Declaration of an array in a file.

    Attributes:
        name: name in the file.
        kind: "text", "number" (finite), or "whole" (integers).
        shape: one word per axis, such as "N T". An axis of one letter has the same length, at least 1, in all arrays of
            the file; "n+2" is two longer than "n". Empty: a scalar.
        low: smallest number allowed.
        high: largest number allowed.
        ascending: whether numbers must increase strictly.
    """

    name: str
    kind: Literal["text", "number", "whole"]
    shape: str = ""
    low: float = 0
    high: float = math.inf
    ascending: bool = False


def read_arrays(path: Path, arrays: Sequence[Array], remedy: str) -> dict[str, NDArray[Any]]:
    """Read and validate the arrays of an ``.npz`` file, by name.

    Args:
        path: the file.
        arrays: declarations of the arrays to read.
        remedy: what to do about an error, on a line of its own.

    Returns:
        Numbers as float64, integers as stored, text as str.

    Raises:
        UserError: the file is damaged or an array is not as declared; names the file and the array.
    """
    values_by_name = read_npz(path, tuple(array.name for array in arrays), remedy)
    lengths: dict[str, int] = {}
    for array in arrays:
        values = values_by_name[array.name]
        problem = _wrong_kind(values, array) or _wrong_shape(values, array, lengths) or _wrong_values(values, array)
        if problem:
            raise UserError(f"{path} is damaged: '{array.name}' {problem}\n{remedy}")
        if array.kind == "number":
            values_by_name[array.name] = values.astype(np.float64)
    return values_by_name


def _wrong_kind(values: NDArray[Any], array: Array) -> str:
    """Return an error if the dtype is not of the declared kind, else ""."""
    kinds = {"text": "U", "number": "iuf", "whole": "iu"}[array.kind]
    expected = {"text": "text", "number": "numbers", "whole": "whole numbers"}[array.kind]
    return "" if values.dtype.kind in kinds else f"holds {str(values.dtype)[:40]}; expected {expected}"


def _wrong_shape(values: NDArray[Any], array: Array, lengths: dict[str, int]) -> str:
    """Return an error if the shape is wrong, and record the ``lengths`` of axes that are new."""
    axes = array.shape.split()
    message = f"is of shape {list(values.shape)[:8]}; expected [{', '.join(axes)}]"
    if len(axes) != values.ndim:
        return message
    # Compare each axis with the first one of the same letter
    for axis, length in zip(axes, values.shape, strict=True):
        letter, _, more = axis.partition("+")
        expected = lengths.setdefault(letter, length - int(more or 0))
        if expected < 1 or length != expected + int(more or 0):
            length_text = ", ".join(f"{name} = {number}" for name, number in lengths.items())
            return f"{message}, with {length_text}"
    return ""


def _wrong_values(values: NDArray[Any], array: Array) -> str:
    """Return an error if a value is out of range or out of order, else ""."""
    if array.kind == "text":
        try:
            values.tolist()
        except ValueError:
            return "holds what is no text"
        return ""
    # Check the range
    bounds = f"expected {'finite numbers' if array.kind == 'number' else 'whole numbers'} from {array.low:g}" + (
        "" if array.high == math.inf else f" to {array.high:g}"
    )
    high = min(array.high, MAX_WHOLE) if array.kind == "whole" else array.high
    is_valid = np.isfinite(values) & (values >= array.low) & (values <= high)
    if not is_valid.all():
        return f"holds {values[~is_valid].flat[0]}; {bounds}"
    # Check the order
    if array.ascending and not (np.diff(values.astype(np.float64)) > 0).all():
        return "does not ascend"
    return ""
