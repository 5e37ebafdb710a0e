"""Density log of a run, ``density-log.csv``: density of every head during gate training, one row per step and head."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from spkv_nas.base.errors import UserError
from spkv_nas.base.tables import Column, read_table

_COLUMNS = (
    Column("step", "number", high=1e15),
    Column("layer", "whole"),
    Column("kv_head", "whole"),
    Column("density", "number", high=1.0),
)


def read_density_log(path: Path) -> pd.DataFrame:
    """Read the density log of a run.

    Raises:
        UserError: the table is invalid or lists a head twice at one step, naming file, line and column.
    """
    rows = read_table(path, "density log", _COLUMNS)
    repeated = rows.duplicated(["step", "layer", "kv_head"])
    if repeated.any():
        line = rows.index[int(repeated.to_numpy().argmax())]
        raise UserError(f"density log {path}, line {line}: a head occurs twice at one step")
    return rows.reset_index(drop=True)
