"""Columns and reader of ``density.csv``.

Densities and scores such as DuoAttention's are in [0, 1]. Scores in nats are signed, because a head may do harm, or
appear to by chance. ``HeadScores.values`` keeps the sign and ranks heads; ``HeadScores.density``, whose shares add up
to coverage, clips negative scores to 0. Clipping happens after the mean over domains: before it, the noise of useless
heads would add up to a gain.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from spkv_nas.base.errors import UserError
from spkv_nas.base.tables import Column, read_table

NATS = "nats per token"  # unit of a signal
_MOST_ERROR = MOST_NATS = 1e3  # bounds of standard errors and of signals in nats
_COLUMNS = (
    Column("layer", "whole"),
    Column("kv_head", "whole"),
    Column("density", "number", high=1.0),
    Column("domain", default="all"),
    Column("num_tokens", "whole", low=1, default="1"),
    Column("num_documents", "whole", default="0"),
    Column("standard_error", "number", high=_MOST_ERROR, default="", gaps=True),
)
_COLUMNS_IN_NATS = tuple(
    replace(column, low=-MOST_NATS, high=MOST_NATS) if column.name == "density" else column for column in _COLUMNS
)
COLUMNS = tuple(column.name for column in _COLUMNS)


def read_rows(file: Path, unit: str | None = None) -> pd.DataFrame:
    """Read the rows of ``density.csv``, filling in default columns.

    Args:
        file: CSV file.
        unit: unit of the values, ``NATS`` or None for values in [0, 1].

    Raises:
        UserError: the table is invalid, naming file and line.
    """
    where = f"density table {file}"
    rows = read_table(file, "density table", _COLUMNS_IN_NATS if unit == NATS else _COLUMNS)
    duplicate = rows.duplicated(["layer", "kv_head", "domain"])
    if duplicate.any():
        line = rows.index[int(duplicate.to_numpy().argmax())]
        raise UserError(
            f"{where}, line {line}: layer {rows['layer'][line]}, KV head {rows['kv_head'][line]} occurs twice"
        )
    _check_complete(rows, where)
    return rows.reset_index(drop=True)


def _check_complete(rows: pd.DataFrame, where: str) -> None:
    """Check that every domain has every head of the grid."""
    layers, heads = int(rows["layer"].max()) + 1, int(rows["kv_head"].max()) + 1
    for domain, domain_rows in rows.groupby("domain"):
        present = set(zip(domain_rows["layer"], domain_rows["kv_head"], strict=True))
        absent = layers * heads - len(present)
        if absent:  # one mistyped layer can make the grid huge: find the first gap only
            grid = ((layer, head) for layer in range(layers) for head in range(heads))
            first = next(head_index for head_index in grid if head_index not in present)
            raise UserError(
                f"{where}: {absent} of {layers * heads} heads are missing in domain '{domain}', starting with "
                f"layer {first[0]}, KV head {first[1]}; the grid must be complete from 0"
            )
