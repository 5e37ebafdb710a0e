"""CSV tables: one writer, and one strict reader for tables that a person may have made or edited.

Errors name the file, the line and the column. A file's module declares its columns once, as ``Column`` values.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_text, write_atomic
from spkv_nas.base.limits import MOST_WHOLE

MOST_BYTES = 2 << 30  # of a table: a search of 100,000 layouts with 640 heads has 80 MB


@dataclass(frozen=True)
class Column:
    """What the cells of a column hold.

    Attributes:
        name: of the column, as in the header.
        kind: "text", "number" (finite), or "whole" (a number without a fraction, up to 2^53).
        low, high: bounds of a number, both allowed.
        above: a number must be more than this, whatever ``low``.
        default: text of every cell where the table has no such column; None: the table must have it.
        gaps: whether the cell of a number may be empty, NaN then; text may always be.
        choices: the texts that are allowed; empty: any.
    """

    name: str
    kind: Literal["text", "number", "whole"] = "text"
    low: float = 0
    high: float = math.inf
    above: float | None = None
    default: str | None = None
    gaps: bool = False
    choices: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """What a cell must be, for people."""
        if self.kind == "text":
            return " or ".join(self.choices) if self.choices else "text"
        number = "a whole number" if self.kind == "whole" else "a number"
        if self.above is not None:
            return f"{number} above {self.above:g}"
        if self.low == -math.inf and self.high == math.inf:
            return number
        return f"{number} from {self.low:g}" if self.high == math.inf else f"{number} in [{self.low:g}, {self.high:g}]"


def write_csv(path: Path, rows: pd.DataFrame, *, digits: int | None = 6) -> None:
    """Write a table with a header, as ``write_atomic`` does; numbers with a fraction to ``digits`` significant digits
    (None: as many as tell them apart).
    """
    write_atomic(path, csv_text(rows, digits=digits))


def csv_text(rows: pd.DataFrame, *, digits: int | None = 6) -> str:
    """What ``write_csv`` writes."""
    text: str = rows.to_csv(index=False, float_format=digits and f"%.{digits}g", lineterminator="\n")
    return text


def read_table(
    file: Path, what: str, columns: Sequence[Column], *, others: bool = False, empty: bool = False
) -> pd.DataFrame:
    """A CSV file as ``columns`` in their order, indexed by line number: text as str, whole numbers as int64 unless
    they may be missing, others as float64.

    Args:
        file: UTF-8, with a header; a byte order mark, empty lines, and blanks around cells are left out.
        what: names the kind of file in errors ("density table").
        columns: what the table may have.
        others: whether columns beside these may be there too; they are left out.
        empty: whether a header without rows will do.

    Raises:
        UserError: naming file, line and column; a column that is missing, unknown or repeated, a cell that is not what
            its column holds, a line of another length than the header, no rows.
    """
    required = tuple(column.name for column in columns if column.default is None)
    cells = _read_cells(file, what, required, tuple(column.name for column in columns), others=others, empty=empty)
    parsed = {}
    for column in columns:
        texts = cells[column.name] if column.name in cells else pd.Series(column.default, cells.index)
        parsed[column.name] = _parse(texts, column, f"{what} {file}")
    return pd.DataFrame(parsed)


def _read_cells(
    file: Path, what: str, required: tuple[str, ...], names: tuple[str, ...], *, others: bool, empty: bool
) -> pd.DataFrame:
    """The cells of a CSV file as text, indexed by line number; ``what`` names the kind of file in errors.

    Raises:
        UserError: naming file and line; a column of ``required`` that is missing, one that is not in ``names`` (unless
            ``others`` may be there) or is there twice, a line of another length than the header, no rows (unless
            ``empty``).
    """
    where = f"{what} {file}"
    reader = csv.reader(io.StringIO(read_text(file, what, most=MOST_BYTES).removeprefix("\ufeff")))
    try:
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if cells]
    except csv.Error as error:
        raise UserError(f"{where}, line {reader.line_num}: not a CSV table: {error}") from error
    if not lines:
        raise UserError(f"{where}: the file is empty; a table has the columns {', '.join(required)}")
    _, header = lines.pop(0)
    missing = [name for name in required if name not in header]
    if missing:
        raise UserError(
            f"{where}: column '{missing[0]}' is missing; a table has {', '.join(required)}, "
            f"this one {', '.join(header)}"
        )
    number = Counter(header)
    wrong = [name for name in header if (number[name] > 1 if name in names else not others)]
    if wrong:
        raise UserError(f"{where}: unknown or repeated column '{wrong[0]}'; known are {', '.join(names)}")
    if not lines and not empty:
        raise UserError(f"{where}: there are no rows below the header")
    for line, cells in lines:
        if len(cells) != len(header):
            raise UserError(f"{where}, line {line}: {len(cells)} values for {len(header)} columns")
    index = [line for line, _ in lines]
    columns = {name: [cells[header.index(name)] for _, cells in lines] for name in names if name in header}
    return pd.DataFrame(columns, index=index, dtype="str")


def _parse(texts: pd.Series[str], column: Column, where: str) -> pd.Series:
    """The cells of one column as what it holds. Raises ``UserError``."""
    if column.kind == "text":
        right = texts.isin(column.choices) if column.choices else pd.Series(True, texts.index)
        values = texts
    else:
        filled = texts != "" if column.gaps else pd.Series(True, texts.index)
        values = pd.to_numeric(texts.where(filled, "nan"), errors="coerce").astype(np.float64)
        right = ~filled | _is_right(values, column)
    if not right.all():
        line = texts.index[int(right.to_numpy().argmin())]
        raise UserError(
            f"{where}, line {line}: column '{column.name}' must be {column.expected}; found '{texts[line][:100]}'"
        )
    return values.astype(np.int64) if column.kind == "whole" and not column.gaps else values


def _is_right(values: pd.Series[float], column: Column) -> pd.Series[bool]:
    """Which numbers are what the column holds."""
    right = np.isfinite(values) & (values <= column.high)
    right &= values >= column.low if column.above is None else values > column.above
    if column.kind == "whole":
        right &= (values == values.round()) & (values.abs() <= MOST_WHOLE)
    return right
