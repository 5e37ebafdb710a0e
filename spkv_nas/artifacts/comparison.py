"""``comparison.csv``: one row per retrained variant of a dense checkpoint, and the names of the two baselines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from spkv_nas.base.errors import UserError
from spkv_nas.base.limits import MOST_SHOWN
from spkv_nas.base.tables import Column, read_table, write_csv

FULL_ATTENTION = "full-attention"
SP_KV = "sp-kv"


def _number(name: str, low: float = 0.0) -> Column:
    return Column(name, "number", low=low, high=MOST_SHOWN, default="", gaps=True)


_COLUMNS = (
    Column("strategy"),
    _number("density_percent"),
    _number("coverage_percent"),
    _number("nll"),  # nats per token
    _number("delta_nll_percent", low=-100.0),  # against full attention, paired by document
    _number("delta_nll_standard_error"),  # in percentage points
    _number("num_global"),
    _number("num_seeds"),
    _number("steps"),
    _number("zero_shot_nll"),
    _number("zero_shot_delta_percent", low=-100.0),
    Column("note", default=""),
)
COLUMNS = tuple(column.name for column in _COLUMNS)
EXTENDED = ("extended_nll", "extended_delta_percent", "extended_delta_standard_error")  # where blocks grew longer


def write_comparison(path: Path, rows: pd.DataFrame) -> None:
    """Write the table, numbers to six significant digits."""
    write_csv(path, rows)


def read_comparison(path: Path) -> pd.DataFrame:
    """The table in a file, as ``complete`` gives it; empty where nothing has been trained yet.

    Raises:
        UserError: naming file, line and column.
    """
    rows = read_table(path, "comparison", _COLUMNS, others=True, empty=True)
    return pd.DataFrame(columns=list(COLUMNS)) if rows.empty else complete(rows)


def check_layout_names(names: Iterable[str]) -> None:
    """Raises ``UserError`` for a layout that has the name of a baseline that it is compared with."""
    for name in names:
        if name in (FULL_ATTENTION, SP_KV):
            raise UserError(
                f"a layout is called '{name}', the name of a baseline that it is compared with: give it another name "
                "(the key 'strategy')"
            )


def complete(rows: pd.DataFrame) -> pd.DataFrame:
    """The table with every column there, numbers as floats (NaN where missing), texts as str.

    The NLL change of full attention, which has none, becomes 0.

    Raises:
        UserError: naming line and column; no strategies, a strategy without a name, what should be a number and is not.
    """
    if "strategy" not in rows:
        raise UserError(f"comparison.csv: the column 'strategy' is missing; found {', '.join(map(str, rows.columns))}")
    checked = rows.reset_index(drop=True)
    nameless = (checked["strategy"].isna() | (checked["strategy"] == "")).to_numpy()
    if nameless.any():
        raise UserError(f"comparison.csv line {int(nameless.argmax()) + 2}: the strategy has no name")
    for column in _COLUMNS:
        if column.kind == "text":
            texts = checked[column.name] if column.name in checked else pd.Series(column.default, checked.index)
            checked[column.name] = texts.astype(object).fillna("").astype(str)
        elif column.name not in checked:
            checked[column.name] = math.nan
        else:
            checked[column.name] = _floats(checked[column.name])
    full = checked["strategy"] == FULL_ATTENTION
    checked.loc[full, "delta_nll_percent"] = checked.loc[full, "delta_nll_percent"].fillna(0.0)
    return checked


def _floats(cells: pd.Series) -> pd.Series[float]:
    """A column of numbers, infinite ones as NaN. Raises ``UserError`` for what is no number."""
    numbers = pd.to_numeric(cells, errors="coerce").astype(float)
    unreadable = (numbers.isna() & cells.notna()).to_numpy()
    if unreadable.any():
        row = int(unreadable.argmax())
        raise UserError(f"comparison.csv line {row + 2}: {cells.name} is {cells[row]!r}; expected a number")
    return numbers.replace([math.inf, -math.inf], math.nan)
