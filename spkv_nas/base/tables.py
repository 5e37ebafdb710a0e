"""CSV tables: one writer, one strict reader of columns that a table's module declares; errors name file and line."""

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from spkv_nas.base import files, limits
from spkv_nas.base.errors import UserError

# Text that a spreadsheet runs as a formula; numbers, and lines in place of a value, are none
_FORMULA = re.compile(r"'*(?:[=@\t\r]|[+-](?![\d.]*(?:e[+-]?\d+)?$|-*$|inf$|nan$))", re.IGNORECASE)
MAX_BYTES = 2 << 30  # maximum size; a search of 100,000 layouts with 640 heads has 80 MB


@dataclass(frozen=True)
class Column:
    """Declaration of a column."""

    name: str  # name in the header
    # "text", "number" (finite), or "whole" (an integer up to 2^53)
    kind: Literal["text", "number", "whole"] = "text"
    low: float = 0  # smallest number allowed
    high: float = math.inf  # largest number allowed
    above: float | None = None  # exclusive lower bound, which replaces ``low``
    # Text of every cell if the table has no such column; None: the column is required
    default: str | None = None
    # Whether numbers may be missing (empty cells, NaN); text may always be empty
    gaps: bool = False
    choices: tuple[str, ...] = ()  # allowed texts; empty: any

    @property
    def expected(self) -> str:
        """Return a description of valid cells, for error messages."""
        if self.kind == "text":
            return " or ".join(self.choices) if self.choices else "text"
        number = "a whole number" if self.kind == "whole" else "a number"
        if self.above is not None:
            return f"{number} above {self.above:g}"
        if self.high < math.inf:
            return f"{number} in [{self.low:g}, {self.high:g}]"
        return f"{number} from {self.low:g}" if self.low > -math.inf else number


def write_csv(path: Path, rows: pd.DataFrame, *, digits: int | None = 6) -> None:
    """Write a table with a header, as ``write_atomic``; ``digits`` significant ones, None: as many as needed."""
    files.write_atomic(path, csv_text(rows, digits=digits))


def csv_text(rows: pd.DataFrame, *, digits: int | None = 6) -> str:
    """Return the text that ``write_csv`` writes.

    Text that a spreadsheet would run as a formula gets an apostrophe before it, which ``read_table`` takes away.
    """
    safe = rows.copy()
    for position, dtype in enumerate(rows.dtypes):
        if not pd.api.types.is_numeric_dtype(dtype):
            safe.isetitem(position, rows.iloc[:, position].map(_escaped))
    text: str = safe.to_csv(
        index=False, float_format=digits and f"%.{digits}g", lineterminator="\n"
    )
    return text


def _escaped(cell: object) -> object:
    """Return a cell with an apostrophe before a text that begins as a formula does, or as an escaped one."""
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def _unescaped(cell: str) -> str:
    """Return the text of a cell that ``_escaped`` returned."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell[1:]) else cell


def read_table(
    file: Path, what: str, columns: Sequence[Column], *, others: bool = False, empty: bool = False
) -> pd.DataFrame:
    """Read and validate the ``columns`` of a CSV file, in their order, indexed by line number.

    Args:
        file: UTF-8 file with a header; a byte order mark, empty lines, and blanks around cells are ignored.
        what: kind of file in errors ("density table").
        columns: declarations of the columns.
        others: whether other columns are allowed; they are left out.
        empty: whether a table without rows is allowed.

    Returns:
        Text as str, integers as int64 unless they may be missing, other numbers as float64.

    Raises ``UserError``: a column is missing, unknown or repeated, a cell is invalid, a line has another length than
    the header, or there are no rows; names file, line and column.
    """
    where = f"{what} {file}"
    lines = _split(files.read_text(file, what, max_bytes=MAX_BYTES), where)
    if not lines:
        required = ", ".join(column.name for column in columns if column.default is None)
        raise UserError(f"{where}: the file is empty; a table has the columns {required}")
    _, header = lines.pop(0)
    _check_header(header, columns, where, others=others)
    if not lines and not empty:
        raise UserError(f"{where}: there are no rows below the header")
    _check_lengths(lines, len(header), where)
    # Convert the columns
    numbers = [number for number, _ in lines]
    parsed = {}
    for column in columns:
        if column.name in header:
            position = header.index(column.name)
            texts = pd.Series([cells[position] for _, cells in lines], numbers, dtype="str")
        else:
            texts = pd.Series(column.default, numbers)
        parsed[column.name] = _parse(texts, column, where)
    return pd.DataFrame(parsed)


def _split(text: str, where: str) -> list[tuple[int, list[str]]]:
    """Split CSV text into the number and the cells of each line that is not empty."""
    reader = csv.reader(io.StringIO(text))
    lines = []
    try:
        for cells in reader:
            if cells:
                lines.append((reader.line_num, [_unescaped(cell.strip()) for cell in cells]))
    except csv.Error as error:
        raise UserError(f"{where}, line {reader.line_num}: not a CSV table: {error}") from error
    return lines


def _check_header(
    header: Sequence[str], columns: Sequence[Column], where: str, *, others: bool
) -> None:
    """Raise ``UserError`` for a column that is missing, repeated or, unless there may be ``others``, unknown."""
    names = [column.name for column in columns]
    required = [column.name for column in columns if column.default is None]
    for name in required:
        if name not in header:
            raise UserError(
                f"{where}: column '{name}' is missing; a table has {', '.join(required)}, "
                f"this one {', '.join(header)}"
            )
    for name in header:
        is_valid = header.count(name) == 1 if name in names else others
        if not is_valid:
            raise UserError(
                f"{where}: unknown or repeated column '{name}'; expected one of {', '.join(names)}"
            )


def _check_lengths(lines: Sequence[tuple[int, list[str]]], width: int, where: str) -> None:
    """Raise ``UserError`` for a line that has another number of cells than the header."""
    for number, cells in lines:
        if len(cells) != width:
            raise UserError(f"{where}, line {number}: {len(cells)} values for {width} columns")


def _parse(texts: "pd.Series[str]", column: Column, where: str) -> pd.Series:
    """Convert the cells of one column to its kind; raise ``UserError`` for an invalid one."""
    # Convert the cells and mark the valid ones
    values: pd.Series = texts
    is_valid = pd.Series(True, texts.index)
    if column.kind != "text":
        is_filled = texts != "" if column.gaps else is_valid
        values = pd.to_numeric(texts.where(is_filled, "nan"), errors="coerce").astype(np.float64)
        is_valid = ~is_filled | _is_in_range(values, column)
    elif column.choices:
        is_valid = texts.isin(column.choices)
    # Report the first invalid cell
    if not is_valid.all():
        line = texts.index[int(is_valid.to_numpy().argmin())]
        raise UserError(
            f"{where}, line {line}: column '{column.name}' must be {column.expected}; "
            f"found '{texts[line][:100]}'"
        )
    if column.kind == "whole" and not column.gaps:
        return values.astype(np.int64)
    return values


def _is_in_range(values: pd.Series, column: Column) -> "pd.Series[bool]":
    """Return which numbers are finite, between the bounds of a column and, if it says so, whole."""
    is_valid = np.isfinite(values) & (values <= column.high)
    is_valid &= values >= column.low if column.above is None else values > column.above
    if column.kind == "whole":
        is_valid &= (values == values.round()) & (values.abs() <= limits.MAX_WHOLE)
    return is_valid
