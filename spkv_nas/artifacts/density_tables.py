"""Density of each KV head by position in the block (``positions.csv``), and over training (``density-log.csv``)."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from spkv_nas.artifacts.grid import Grid, grid_words
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import is_file
from spkv_nas.base.tables import Column, read_table

_POSITION_COLUMNS = (
    Column("layer", "whole"),
    Column("kv_head", "whole"),
    Column("start", "whole"),
    Column("end", "whole"),
    Column("density", "number", high=1.0),
    Column("num_tokens", "whole"),
)
_LOG_COLUMNS = (
    Column("step", "number", high=1e15),
    Column("layer", "whole"),
    Column("kv_head", "whole"),
    Column("density", "number", high=1.0),
)


def read_positions(path: Path, grid: Grid) -> pd.DataFrame | None:
    """Read the density by position, None without a file. Raises ``UserError`` if a head is outside ``grid``."""
    if not is_file(path):
        return None
    rows = read_table(path, "positions", _POSITION_COLUMNS)
    # Check the heads and the ranges of positions
    is_invalid = (rows["layer"] >= grid[0]) | (rows["kv_head"] >= grid[1]) | (rows["start"] >= rows["end"])
    if is_invalid.any():
        line = rows.index[int(is_invalid.to_numpy().argmax())]
        raise UserError(
            f"positions {path}, line {line}: expected a head of {grid_words(grid)}, and a start before the end\n"
            "probe again, or remove the file: only a figure needs it"
        )
    return rows.reset_index(drop=True)


def read_density_log(path: Path) -> pd.DataFrame:
    """Read the density log of a run.

    Raises:
        UserError: the table is invalid or lists a head twice at one step, naming file, line and column.
    """
    rows = read_table(path, "density log", _LOG_COLUMNS)
    repeated = rows.duplicated(["step", "layer", "kv_head"])
    if repeated.any():
        line = rows.index[int(repeated.to_numpy().argmax())]
        raise UserError(f"density log {path}, line {line}: a head occurs twice at one step")
    return rows.reset_index(drop=True)
