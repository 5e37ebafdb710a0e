"""Arrays in ``.npz`` files: one strict reader, as ``base.tables`` has one for CSV.

A file's module declares its arrays once, as ``Array`` values: kind, shape and range of what the code will index, divide
and take logarithms with. zip's own checksum finds a flipped bit; it does not find an array of another run.
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
from spkv_nas.base.limits import MOST_WHOLE


@dataclass(frozen=True)
class Array:
    """What an array of a file holds.

    Attributes:
        name: in the file.
        kind: "text", "number" (finite), or "whole" (integers).
        shape: a word per axis, such as "N T"; an axis of one letter has the same length, at least 1, in all arrays of
            the file, and "n+2" is two longer than "n". Empty: a single value.
        low, high: bounds of a number, both allowed.
        ascending: whether each number must be more than the one before.
    """

    name: str
    kind: Literal["text", "number", "whole"]
    shape: str = ""
    low: float = 0
    high: float = math.inf
    ascending: bool = False


def read_arrays(path: Path, arrays: Sequence[Array], remedy: str) -> dict[str, NDArray[Any]]:
    """The arrays of an ``.npz`` file by name: numbers as float64, whole ones as they are stored, text as str.

    Raises:
        UserError: naming the file and the array that is not what it should be; ``remedy`` says what to do.
    """
    found = read_npz(path, tuple(array.name for array in arrays), remedy)
    lengths: dict[str, int] = {}
    for array in arrays:
        values = found[array.name]
        wrong = _wrong_kind(values, array) or _wrong_shape(values, array, lengths) or _wrong_values(values, array)
        if wrong:
            raise UserError(f"{path} is damaged: '{array.name}' {wrong}\n{remedy}")
        if array.kind == "number":
            found[array.name] = values.astype(np.float64)
    return found


def _wrong_kind(values: NDArray[Any], array: Array) -> str:
    kinds = {"text": "U", "number": "iuf", "whole": "iu"}[array.kind]
    expected = {"text": "text", "number": "numbers", "whole": "whole numbers"}[array.kind]
    return "" if values.dtype.kind in kinds else f"holds {str(values.dtype)[:40]}; expected {expected}"


def _wrong_shape(values: NDArray[Any], array: Array, lengths: dict[str, int]) -> str:
    """Also notes the ``lengths`` of axes that no array before has had."""
    axes = array.shape.split()
    said = f"is of shape {list(values.shape)[:8]}; expected [{', '.join(axes)}]"
    if len(axes) != values.ndim:
        return said
    for axis, length in zip(axes, values.shape, strict=True):
        letter, _, more = axis.partition("+")
        expected = lengths.setdefault(letter, length - int(more or 0))
        if expected < 1 or length != expected + int(more or 0):
            known = ", ".join(f"{name} = {number}" for name, number in lengths.items())
            return f"{said}, with {known}"
    return ""


def _wrong_values(values: NDArray[Any], array: Array) -> str:
    if array.kind == "text":
        try:
            values.tolist()
        except ValueError:
            return "holds what is no text"
        return ""
    bounds = f"expected {'finite numbers' if array.kind == 'number' else 'whole numbers'} from {array.low:g}" + (
        "" if array.high == math.inf else f" to {array.high:g}"
    )
    high = min(array.high, MOST_WHOLE) if array.kind == "whole" else array.high
    right = np.isfinite(values) & (values >= array.low) & (values <= high)
    if not right.all():
        return f"holds {values[~right].flat[0]}; {bounds}"
    if array.ascending and not (np.diff(values.astype(np.float64)) > 0).all():
        return "does not ascend"
    return ""
