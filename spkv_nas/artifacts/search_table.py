"""``search.csv``: one row per layout that a search tried, with what it measured."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from spkv_nas.base.errors import UserError

BASELINE = "baseline"  # in place of a sampler: layouts that the search started from or compares with

COLUMNS = (
    "name",
    "sampler",
    "seed",
    "trial",
    "hash",
    "num_global",
    "coverage_percent",
    "cost",
    "zero_shot_delta_percent",
    "zero_shot_standard_error",
    "short_delta_percent",
    "short_standard_error",
    "full_delta_percent",
    "full_standard_error",
    "heads",
)


def read_search(path: Path) -> pd.DataFrame:
    """What ``search`` wrote to ``search.csv``. Raises ``UserError`` if a column is missing or holds no numbers."""
    rows = pd.read_csv(path)
    if missing := set(COLUMNS) - set(rows.columns):
        raise UserError(f"{path}: the column '{min(missing)}' is missing")
    for column in COLUMNS:
        if column.endswith(("percent", "error")) or column in ("cost", "trial", "num_global"):
            try:
                rows[column] = pd.to_numeric(rows[column]).astype(float)
            except (ValueError, TypeError) as error:
                raise UserError(f"{path}: the column '{column}' holds what is not a number") from error
    return rows
