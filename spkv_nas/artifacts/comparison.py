"""``comparison.csv``: the dense model as it is, then one row per retrained variant of it; the names of the baselines.

Changes of NLL count from the dense model as it is, which a user would deploy without a layout. The control, full
attention retrained like the layouts, has its own columns: it says how much of a change is the retraining's. Files of
older versions have no row ``dense``; their changes count from the control (``counted_from``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from spkv_nas.base.errors import UserError
from spkv_nas.base.limits import MOST_SHOWN
from spkv_nas.base.tables import Column, read_table, write_csv

DENSE = "dense"  # the dense model as it is: not retrained
FULL_ATTENTION = "full-attention"  # the control: full attention retrained like the layouts
SP_KV = "sp-kv"
BASELINES = (DENSE, FULL_ATTENTION, SP_KV)  # rows that are no layouts


def _number(name: str, low: float = 0.0) -> Column:
    return Column(name, "number", low=low, high=MOST_SHOWN, default="", gaps=True)


_COLUMNS = (
    Column("strategy"),
    _number("density_percent"),
    _number("coverage_percent"),
    _number("nll"),  # nats per token
    _number("delta_nll_percent", low=-100.0),  # against the dense model as it is, paired by document
    _number("delta_nll_standard_error"),  # in percentage points
    _number("delta_control_percent", low=-100.0),  # against the control, paired by document
    _number("delta_control_standard_error"),
    _number("num_global"),
    _number("num_seeds"),
    _number("steps"),
    _number("zero_shot_nll"),
    _number("zero_shot_delta_percent", low=-100.0),
    Column("note", default=""),
)
COLUMNS = tuple(column.name for column in _COLUMNS)
# Where blocks grew longer; against the control, since the dense model as it is has not learned their positions.
EXTENDED = ("extended_nll", "extended_delta_percent", "extended_delta_standard_error")


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
        if name in BASELINES:
            raise UserError(
                f"a layout is called '{name}', the name of a baseline that it is compared with: give it another name "
                "(the key 'strategy')"
            )


def complete(rows: pd.DataFrame) -> pd.DataFrame:
    """The table with every column there, numbers as floats (NaN where missing), texts as str.

    A baseline's change against itself is 0. In a file without the row ``dense`` changes count from the control, so the
    columns against the control repeat them.

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
    if counted_from(checked) == FULL_ATTENTION:
        for kind in ("percent", "standard_error"):
            checked[f"delta_control_{kind}"] = checked[f"delta_nll_{kind}"]
    for baseline, change in ((counted_from(checked), "delta_nll_percent"), (FULL_ATTENTION, "delta_control_percent")):
        itself = checked["strategy"] == baseline
        checked.loc[itself, change] = checked.loc[itself, change].fillna(0.0)
    return checked


def counted_from(rows: pd.DataFrame) -> str:
    """Return the row that ``delta_nll_percent`` counts from: ``DENSE``, or ``FULL_ATTENTION`` in an older file."""
    return DENSE if (rows["strategy"] == DENSE).any() else FULL_ATTENTION


def _floats(cells: pd.Series) -> pd.Series[float]:
    """A column of numbers, infinite ones as NaN. Raises ``UserError`` for what is no number."""
    numbers = pd.to_numeric(cells, errors="coerce").astype(float)
    unreadable = (numbers.isna() & cells.notna()).to_numpy()
    if unreadable.any():
        row = int(unreadable.argmax())
        raise UserError(f"comparison.csv line {row + 2}: {cells.name} is {cells[row]!r}; expected a number")
    return numbers.replace([math.inf, -math.inf], math.nan)
