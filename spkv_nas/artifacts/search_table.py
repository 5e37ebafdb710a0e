"""Table of a layout search, ``search.csv``: one row per layout with its scores."""

from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
from pydantic import Field

from spkv_nas.base import errors, limits, schema
from spkv_nas.base.tables import Column, read_table

BASELINE = "baseline"  # sampler of layouts that the search started from or compares with

Retraining = Literal["short", "full"]
# How a score was measured: untrained, short run or full run
Fidelity = Literal["zero_shot", Retraining]
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)

_MAX_COST = 1e30

_COLUMNS = (
    Column("name"),
    Column("sampler"),
    Column("seed", "whole"),
    Column("trial", "whole"),
    Column("hash"),
    Column("num_global", "whole"),
    Column("coverage_percent", "number", high=limits.MAX_SHOWN, gaps=True),
    Column("cost", "number", low=-_MAX_COST, high=_MAX_COST, gaps=True),
    *(
        column
        for fidelity in FIDELITIES
        for column in (
            Column(
                f"{fidelity}_delta_percent",
                "number",
                low=-limits.MAX_SHOWN,
                high=limits.MAX_SHOWN,
                gaps=True,
            ),
            Column(f"{fidelity}_standard_error", "number", high=limits.MAX_SHOWN, gaps=True),
        )
    ),
    Column("heads"),
)
COLUMNS = tuple(column.name for column in _COLUMNS)


class SelectionDocuments(schema.Recorded):
    """Numbers of documents of a search."""

    chosen_on: int | None = None


class SearchRecord(schema.Recorded):
    """Keys of ``search.yaml`` that are read back."""

    window: int | None = Field(None, ge=1, le=limits.MAX_WINDOW)
    sinks: int | None = Field(None, ge=0, le=limits.MAX_WINDOW)
    steps: dict[Retraining, float] | None = None
    recipe: dict[str, Any] | None = None
    data: dict[str, Any] | list[str] | None = None
    block_size: int | None = Field(None, ge=2)
    num_documents: int | None = None
    effective_documents: float | None = None
    documents: SelectionDocuments | None = None
    selection: str | None = None


def read_search(path: Path) -> pd.DataFrame:
    """Read ``search.csv``; values that were not measured are NaN. ``UserError`` if the table is invalid."""
    rows = read_table(path, "search", _COLUMNS, others=True)
    if rows["zero_shot_delta_percent"].isna().all():
        raise errors.UserError(
            f"search {path}: column 'zero_shot_delta_percent' is empty: no layout has a score"
        )
    is_grid = rows["heads"].map(
        lambda heads: bool(heads) and len({len(layer) for layer in heads.split()}) == 1
    )
    if not is_grid.all():
        line = rows.index[~is_grid][0]
        raise errors.UserError(
            f"search {path}, line {line}: column 'heads' must have one word of G and L per layer"
        )
    return rows.reset_index(drop=True)
