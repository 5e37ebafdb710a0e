"""Table of a layout search, ``search.csv``: one row per layout with its scores."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import pandas as pd

from spkv_nas.base.limits import MAX_SHOWN
from spkv_nas.base.tables import Column, read_table

BASELINE = "baseline"  # sampler of layouts that the search started from or compares with

Retraining = Literal["short", "full"]
Fidelity = Literal["zero_shot", Retraining]  # how a score was measured: untrained, short run or full run
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)

_MAX_COST = 1e30

_COLUMNS = (
    Column("name"),
    Column("sampler"),
    Column("seed", "whole"),
    Column("trial", "whole"),
    Column("hash"),
    Column("num_global", "whole"),
    Column("coverage_percent", "number", high=MAX_SHOWN, gaps=True),
    Column("cost", "number", low=-_MAX_COST, high=_MAX_COST, gaps=True),
    *(
        column
        for fidelity in FIDELITIES
        for column in (
            Column(f"{fidelity}_delta_percent", "number", low=-MAX_SHOWN, high=MAX_SHOWN, gaps=True),
            Column(f"{fidelity}_standard_error", "number", high=MAX_SHOWN, gaps=True),
        )
    ),
    Column("zero_shot_tokens", "whole", default="", gaps=True),
    Column("heads"),
)
COLUMNS = tuple(column.name for column in _COLUMNS)


def whole_scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows whose zero-shot ΔNLL was measured on the whole text, and not estimated from a part."""
    tokens = rows["zero_shot_tokens"]
    return rows[~(tokens < tokens.max())]


def read_search(path: Path) -> pd.DataFrame:
    """Read ``search.csv``; values that were not measured are NaN.

    Raises:
        UserError: the table is invalid, naming file, line and column.
    """
    return read_table(path, "search", _COLUMNS, others=True).reset_index(drop=True)
