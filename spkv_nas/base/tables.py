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
    kind: Literal["text", "number", "whole"] = (
        "text"  # "text", "number" (finite), or "whole" (an integer up to 2^53)
    )
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
        if self.low == -math.inf and self.high == math.inf:
            return number
        return (
            f"{number} from {self.low:g}"
            if self.high == math.inf
            else f"{number} in [{self.low:g}, {self.high:g}]"
        )


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
    cells = _read_cells(
        files.read_text(file, what, max_bytes=MAX_BYTES), columns, where, others=others, empty=empty
    )
    parsed = {}
    for column in columns:
        texts = (
            cells[column.name] if column.name in cells else pd.Series(column.default, cells.index)
        )
        parsed[column.name] = _parse(texts, column, where)
    return pd.DataFrame(parsed)


def _read_cells(
    text: str, columns: Sequence[Column], where: str, *, others: bool, empty: bool
) -> pd.DataFrame:
    """Split CSV text into cells, indexed by line number, and check the header and the lengths of lines."""
    names = [column.name for column in columns]
    required = [column.name for column in columns if column.default is None]
    # Split lines into cells
    reader = csv.reader(io.StringIO(text))
    try:
        lines = [
            (reader.line_num, [_unescaped(cell.strip()) for cell in cells])
            for cells in reader
            if cells
        ]
    except csv.Error as error:
        raise UserError(f"{where}, line {reader.line_num}: not a CSV table: {error}") from error
    if not lines:
        raise UserError(
            f"{where}: the file is empty; a table has the columns {', '.join(required)}"
        )
    # Check the header
    _, header = lines.pop(0)
    missing = [name for name in required if name not in header]
    if missing:
        raise UserError(
            f"{where}: column '{missing[0]}' is missing; a table has {', '.join(required)}, "
            f"this one {', '.join(header)}"
        )
    invalid = [name for name in header if (header.count(name) > 1 if name in names else not others)]
    if invalid:
        raise UserError(
            f"{where}: unknown or repeated column '{invalid[0]}'; expected one of {', '.join(names)}"
        )
    # Check the rows
    if not lines and not empty:
        raise UserError(f"{where}: there are no rows below the header")
    for line, cells in lines:
        if len(cells) != len(header):
            raise UserError(f"{where}, line {line}: {len(cells)} values for {len(header)} columns")
    by_name = {
        name: [cells[header.index(name)] for _, cells in lines] for name in names if name in header
    }
    return pd.DataFrame(by_name, index=[line for line, _ in lines], dtype="str")


def _parse(texts: "pd.Series[str]", column: Column, where: str) -> pd.Series:
    """Convert the cells of one column to its kind; raise ``UserError`` for an invalid one."""
    # Convert the cells and mark the valid ones
    values: pd.Series = texts
    is_valid = texts.isin(column.choices) if column.choices else pd.Series(True, texts.index)
    if column.kind != "text":
        filled = texts != "" if column.gaps else pd.Series(True, texts.index)
        values = pd.to_numeric(texts.where(filled, "nan"), errors="coerce").astype(np.float64)
        in_range = np.isfinite(values) & (values <= column.high)
        in_range &= values >= column.low if column.above is None else values > column.above
        if column.kind == "whole":
            in_range &= (values == values.round()) & (values.abs() <= limits.MAX_WHOLE)
        is_valid = ~filled | in_range
    # Report the first invalid cell
    if not is_valid.all():
        line = texts.index[int(is_valid.to_numpy().argmin())]
        raise UserError(
            f"{where}, line {line}: column '{column.name}' must be {column.expected}; found '{texts[line][:100]}'"
        )
    return values.astype(np.int64) if column.kind == "whole" and not column.gaps else values
