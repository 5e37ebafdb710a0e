"""CSV tables that a person may have made or edited: strict parsing, and errors that name file, line and column."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import numpy as np
import pandas as pd

from spkv_nas.errors import UserError
from spkv_nas.files import read_text


def read_cells(file: Path, what: str, required: tuple[str, ...], known: tuple[str, ...]) -> pd.DataFrame:
    """The cells of a CSV file as text, indexed by line number; ``what`` names the kind of file in errors.

    Raises:
        UserError: naming file and line; a column that is missing, unknown or repeated, a short line, no rows.
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
    unknown = [column for column in header if column not in known or header.count(column) > 1]
    if unknown:
        raise UserError(f"{where}: unknown or repeated column '{unknown[0]}'; known are {', '.join(known)}")
    if not lines:
        raise UserError(f"{where}: there are no rows below the header")
    for line, cells in lines:
        if len(cells) != len(header):
            raise UserError(f"{where}, line {line}: {len(cells)} values for {len(header)} columns")
    return pd.DataFrame([cells for _, cells in lines], columns=header, index=[line for line, _ in lines])


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
