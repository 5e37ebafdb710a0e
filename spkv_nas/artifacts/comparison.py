"""Comparison table, ``comparison.csv``: the untouched dense model, then one row per retrained variant.

Changes of NLL are relative to the untouched dense model, which is what a user would deploy without a layout. The
control, full attention retrained like the layouts, has columns of its own: they show how much of a change is due to
the retraining alone. Files of older versions have no ``dense`` row; their changes are relative to the control
(``counted_from``).
"""

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pandas as pd
from pydantic import Field

from spkv_nas.base import limits, schema, tables
from spkv_nas.base.errors import UserError

DENSE = "dense"  # the dense model as given, not retrained
FULL_ATTENTION = "full-attention"  # the control: full attention retrained like the layouts
SP_KV = "sp-kv"
BASELINES = (DENSE, FULL_ATTENTION, SP_KV)  # rows that are not layouts


_number = partial(tables.Column, kind="number", high=limits.MAX_SHOWN, default="", gaps=True)
_COLUMNS = (
    tables.Column("strategy"),
    _number("density_percent"),
    _number("coverage_percent"),
    _number("nll"),  # nats per token
    # Against the untouched dense model, paired by document
    _number("delta_nll_percent", low=-100.0),
    _number("delta_nll_standard_error"),  # in percentage points
    _number("delta_control_percent", low=-100.0),  # against the control, paired by document
    _number("delta_control_standard_error"),
    _number("num_global"),
    _number("num_seeds"),
    _number("steps"),
    _number("zero_shot_nll"),
    _number("zero_shot_delta_percent", low=-100.0),
    tables.Column("note", default=""),
)
COLUMNS = tuple(column.name for column in _COLUMNS)


class RankCorrelation(schema.Recorded):
    """Rank correlation of a predictor and the change of NLL over layouts, as ``evaluation.ranking`` computes it."""

    rho: float
    layouts: int = 0
    interval: list[float] | None = Field(None, min_length=2, max_length=2)
    p_value: float | None = None


class HeldoutSize(schema.Recorded):
    """Size of the text that a comparison evaluates on."""

    documents: int | None = None
    effective_documents: float | None = None


class ComparisonRecord(schema.Recorded):
    """Keys of ``comparison.yaml`` that are read back."""

    heldout: HeldoutSize | None = None
    rank_correlation: RankCorrelation | None = None
    zero_shot_rank_correlation: RankCorrelation | None = None


def write_comparison(path: Path, rows: pd.DataFrame) -> None:
    """Write the table, with numbers to six significant digits."""
    tables.write_csv(path, rows)


def read_comparison(path: Path) -> pd.DataFrame:
    """Read a comparison and normalise it with ``complete``; the table is empty if nothing has been trained yet."""
    rows = tables.read_table(path, "comparison", _COLUMNS, others=True, empty=True)
    return pd.DataFrame(columns=list(COLUMNS)) if rows.empty else complete(rows)


def check_layout_names(names: Iterable[str]) -> None:
    """Raise ``UserError`` if a layout is named like one of ``BASELINES``."""
    for name in names:
        if name in BASELINES:
            raise UserError(
                f"the layout name '{name}' is reserved for a baseline of the comparison: rename "
                "the layout (the key 'strategy')"
            )


def complete(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the table with all columns present: numbers as floats (NaN where missing), text as str.

    The change of a baseline against itself is 0. Without a ``dense`` row, changes are relative to the control, so they
    are copied to the columns against the control. Raises ``UserError`` for a row without a strategy, or an invalid
    number.
    """
    # Check that every row names its strategy
    if "strategy" not in rows:
        raise UserError(
            "comparison.csv: the column 'strategy' is missing; found "
            f"{', '.join(map(str, rows.columns))}"
        )
    missing = [name for name in COLUMNS if name not in rows]
    checked = rows.reset_index(drop=True).reindex(columns=[*rows.columns, *missing])
    nameless = (checked["strategy"].isna() | (checked["strategy"] == "")).to_numpy()
    if nameless.any():
        raise UserError(
            f"comparison.csv line {int(nameless.argmax()) + 2}: the strategy has no name"
        )
    # Fill in missing cells, and convert numbers to floats, infinite ones to NaN
    for column in _COLUMNS:
        cells = checked[column.name]
        if column.kind == "text":
            checked[column.name] = cells.astype(object).fillna("").astype(str)
            continue
        numbers = pd.to_numeric(cells, errors="coerce").astype(float)
        unreadable = (numbers.isna() & cells.notna()).to_numpy()
        if unreadable.any():
            row = int(unreadable.argmax())
            raise UserError(
                f"comparison.csv line {row + 2}: {column.name} is {cells[row]!r}; expected a number"
            )
        checked[column.name] = numbers.replace([math.inf, -math.inf], math.nan)
    # Copy changes to the columns against the control in files of older versions
    if counted_from(checked) == FULL_ATTENTION:
        for kind in ("percent", "standard_error"):
            checked[f"delta_control_{kind}"] = checked[f"delta_nll_{kind}"]
    # Set the change of each baseline against itself to 0
    for baseline, change in (
        (counted_from(checked), "delta_nll_percent"),
        (FULL_ATTENTION, "delta_control_percent"),
    ):
        is_baseline = checked["strategy"] == baseline
        checked.loc[is_baseline, change] = checked.loc[is_baseline, change].fillna(0.0)
    return checked


def counted_from(rows: pd.DataFrame) -> str:
    """Return the baseline of ``delta_nll_percent``: ``DENSE``, or ``FULL_ATTENTION`` in an older file."""
    return DENSE if (rows["strategy"] == DENSE).any() else FULL_ATTENTION
