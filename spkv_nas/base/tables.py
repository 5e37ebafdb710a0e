"""CSV tables: one writer, and one strict reader for tables that a person may have made or edited.

Errors name the file, the line and the column. A file's module declares its columns once, as ``Column`` values.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_text, write_atomic


@dataclass(frozen=True)
class Column:
    """What the cells of a column hold.

    Attributes:
        kind: "text", "number" (finite), or "whole" (a number without a fraction).
        low, high: bounds of a number, both allowed.
        above: a number must be more than this.
        default: text of every cell where the table has no such column; None: the table must have it.
        gaps: whether a cell may be empty; a number is then NaN.
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
        if self.above is not None:
            return f"a number above {self.above:g}"
        if self.kind == "whole":
            return f"a whole number from {self.low:g}"
        if self.low == -math.inf and self.high == math.inf:
            return "a number"
        return f"a number from {self.low:g}" if self.high == math.inf else f"a number in [{self.low:g}, {self.high:g}]"


def write_csv(path: Path, rows: pd.DataFrame, *, digits: int | None = 6) -> None:
    """Write a table with a header, numbers to ``digits`` significant digits (None: all), as ``write_atomic`` does."""
    write_atomic(path, csv_text(rows, digits=digits))


def csv_text(rows: pd.DataFrame, *, digits: int | None = 6) -> str:
    """What ``write_csv`` writes."""
    text: str = rows.to_csv(index=False, float_format=digits and f"%.{digits}g", lineterminator="\n")
    return text


def read_table(file: Path, what: str, columns: Sequence[Column], *, others: bool = False) -> pd.DataFrame:
    """A CSV file as ``columns`` in their order, indexed by line number; whole numbers without gaps are int64.

    Args:
        what: names the kind of file in errors ("density table").
        others: whether columns that are not in ``columns`` may be there; they are left out.

    Raises:
        UserError: naming file, line and column; a column that is missing, unknown or repeated, a cell that is not what
            its column holds, a short line, no rows.
    """
    required = tuple(column.name for column in columns if column.default is None)
    cells = read_cells(file, what, required, None if others else tuple(column.name for column in columns))
    parsed = pd.DataFrame(index=cells.index)
    for column in columns:
        texts = cells[column.name] if column.name in cells else pd.Series(column.default, cells.index, dtype=object)
        parsed[column.name] = _parse(texts.rename(column.name), column, f"{what} {file}")
    return parsed


def read_cells(file: Path, what: str, required: tuple[str, ...], known: tuple[str, ...] | None) -> pd.DataFrame:
    """The cells of a CSV file as text, indexed by line number; ``what`` names the kind of file in errors.

    Raises:
        UserError: naming file and line; a column that is missing, unknown (unless ``known`` is None) or repeated, a
            short line, no rows.
    """
    where = f"{what} {file}"
    reader = csv.reader(io.StringIO(read_text(file, what).removeprefix("\ufeff")))
    try:
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if cells]
    except csv.Error as error:
        raise UserError(f"{where}, line {reader.line_num}: not a CSV table: {error}") from error
    if not lines:
        raise UserError(f"{where}: the file is empty; a table has the columns {', '.join(required)}")
    _, header = lines.pop(0)
    missing = [column for column in required if column not in header]
    if missing:
        raise UserError(f"{where}: column '{missing[0]}' is missing; a table has {', '.join(required)}")
    unknown = [name for name in header if (known is not None and name not in known) or header.count(name) > 1]
    if unknown:
        hint = "" if known is None else f"; known are {', '.join(known)}"
        raise UserError(f"{where}: unknown or repeated column '{unknown[0]}'{hint}")
    if not lines:
        raise UserError(f"{where}: there are no rows below the header")
    for line, cells in lines:
        if len(cells) != len(header):
            raise UserError(f"{where}, line {line}: {len(cells)} values for {len(header)} columns")
    return pd.DataFrame([cells for _, cells in lines], columns=header, index=[line for line, _ in lines])


def _parse(texts: pd.Series[str], column: Column, where: str) -> pd.Series:
    """The cells of one column as what it holds. Raises ``UserError``."""
    if column.kind == "text":
        wrong = ~texts.isin(column.choices) if column.choices else pd.Series(False, texts.index)
        if wrong.any():
            line = texts.index[int(wrong.to_numpy().argmax())]
            raise UserError(
                f"{where}, line {line}: column '{column.name}' must be {' or '.join(column.choices)}; "
                f"found '{texts[line]}'"
            )
        return texts
    known = texts != "" if column.gaps else pd.Series(True, texts.index)
    values = pd.to_numeric(texts[known], errors="coerce").astype(np.float64)
    wrong = ~(np.isfinite(values) & (values >= column.low) & (values <= column.high))
    if column.above is not None:
        wrong |= ~(values > column.above)
    if column.kind == "whole":
        wrong |= values != values.round()
    if wrong.any():
        line = values.index[int(wrong.to_numpy().argmax())]
        raise UserError(
            f"{where}, line {line}: column '{column.name}' must be {column.expected}; found '{texts[line]}'"
        )
    numbers = values.reindex(texts.index)
    return numbers.astype(np.int64) if column.kind == "whole" and not column.gaps else numbers


def numbers(
    column: pd.Series[str], where: str, *, whole: bool = False, low: int = 0, high: float = math.inf
) -> pd.Series[float]:
    """The texts of a column as numbers in [low, high]; ``where`` starts the message of the ``UserError``."""
    values = pd.to_numeric(column, errors="coerce")
    bad = ~(np.isfinite(values) & (values >= low) & (values <= high))
    if whole:
        bad |= values != values.round()
    if bad.any():
        index = column.index[int(bad.to_numpy().argmax())]
        number = f"a number from {low}" if high == math.inf else f"a number in [{low}, {high:g}]"
        expected = f"a whole number from {low}" if whole else number
        raise UserError(f"{where}, line {index}: column '{column.name}' must be {expected}; found '{column[index]}'")
    return values
