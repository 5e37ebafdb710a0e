"""Strict reader of ``.npz`` files, as ``base.tables`` has one for CSV.

The module of a file format declares its arrays once, as ``Array`` values: kind, shape and the range that is safe to
index, divide and take logarithms with. The checksum of zip detects a flipped bit, but not an array of another run.
The types of numpy arrays are named here, too.
"""

import math
import os
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base import files, limits
from spkv_nas.base.errors import UserError, first_line

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Mask = NDArray[np.bool_]
Tokens = NDArray[np.int32]
# Maximum bytes of unpacked arrays, or multiple of the file's size if that is more
_MAX_UNPACKED = (1 << 30, 100)
# Dtypes, and words for errors
_KINDS = {
    "text": ("U", "text"),
    "number": ("iuf", "numbers"),
    "whole": ("iu", "whole numbers"),
}


@dataclass(frozen=True)
class Array:
    """Declaration of an array in a file."""

    name: str  # name in the file
    kind: Literal["text", "number", "whole"]  # "text", "number" (finite), or "whole" (integers)
    # One word per axis, such as "N T". An axis of one letter has the same length, at least 1, in all arrays of the
    # file; "n+2" is two longer than "n". Empty: a scalar
    shape: str = ""
    low: float = 0  # smallest number allowed
    high: float = math.inf  # largest number allowed
    ascending: bool = False  # whether numbers must increase strictly


def read_arrays(path: Path, arrays: Sequence[Array], remedy: str) -> dict[str, NDArray[Any]]:
    """Read the arrays of an ``.npz`` file by name: numbers as float64, integers as stored, text as str.

    Raises ``UserError``: the file is damaged or an array is not as declared; names the file and the array, and says on
    a line of its own what to do (``remedy``).
    """
    values_by_name = read_npz(path, tuple(array.name for array in arrays), remedy)
    lengths: dict[str, int] = {}
    for array in arrays:
        values = values_by_name[array.name]
        problem = _wrong_shape(values, array, lengths) or _wrong_values(values, array)
        if problem:
            raise UserError(f"{path} is damaged: '{array.name}' {problem}\n{remedy}")
        if array.kind == "number":
            values_by_name[array.name] = values.astype(np.float64)
    return values_by_name


def read_npz(path: Path, names: tuple[str, ...], remedy: str) -> dict[str, NDArray[Any]]:
    """Read arrays without checking their contents; ``UserError`` if the file is damaged or lacks one."""
    if not files.is_file(path):
        raise UserError(f"{path} does not exist or is not a regular file\n{remedy}")
    try:
        # Open the file here, because ``np.load`` does not close it on failure
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers of files from other programs
            _check_unpacked(file)
            with np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in names}
    except MemoryError as error:
        raise UserError(
            f"{path} does not fit into memory, or is damaged: {first_line(error)}\n{remedy}"
        ) from error
    # Errors of numpy, zipfile, zlib or Python's parser, which reads array headers
    except Exception as error:
        raise UserError(f"{path} is damaged: {first_line(error)}\n{remedy}") from error


def _check_unpacked(file: BinaryIO) -> None:
    """Raise ``ValueError`` for a zip bomb, whose few bytes expand to fill the memory."""
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    most, factor = _MAX_UNPACKED
    if unpacked > max(most, factor * size):
        raise ValueError(f"its {size} bytes claim to hold {unpacked}")


def _wrong_shape(values: NDArray[Any], array: Array, lengths: dict[str, int]) -> str:
    """Return an error if dtype or shape is wrong, else ""; record the ``lengths`` of axes that are new."""
    dtypes, words = _KINDS[array.kind]
    if values.dtype.kind not in dtypes:
        return f"holds {str(values.dtype)[:40]}; expected {words}"
    axes = array.shape.split()
    message = f"is of shape {list(values.shape)[:8]}; expected [{', '.join(axes)}]"
    if len(axes) != values.ndim:
        return message
    # Compare each axis with the first one of the same letter
    for axis, length in zip(axes, values.shape, strict=True):
        letter, _, digits = axis.partition("+")
        more = int(digits or 0)
        expected = lengths.setdefault(letter, length - more)
        if expected < 1 or length != expected + more:
            known = ", ".join(f"{name} = {number}" for name, number in lengths.items())
            return f"{message}, with {known}"
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
    high = min(array.high, limits.MAX_WHOLE) if array.kind == "whole" else array.high
    is_valid = np.isfinite(values) & (values >= array.low) & (values <= high)
    if not is_valid.all():
        kind = "finite numbers" if array.kind == "number" else "whole numbers"
        most = "" if array.high == math.inf else f" to {array.high:g}"
        return f"holds {values[~is_valid].flat[0]}; expected {kind} from {array.low:g}{most}"
    # Check the order
    if array.ascending and not (np.diff(values.astype(np.float64)) > 0).all():
        return "does not ascend"
    return ""
