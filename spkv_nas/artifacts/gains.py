"""Individual gain of every head, ``probes/<name>/gains.csv``, used to validate the ranking of the table beside it.

The gain of a head is the NLL, in nats per token, that its global attention saves in a model whose other heads are all
local (signal ``add-one-head`` of ``probing.gains``), measured on a few thousand tokens. Such gains are noisy and ignore
interactions between heads, so they only validate a table as a whole and name the heads that it clearly misses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.grid import Grid, grid_words
from spkv_nas.artifacts.head_score_rows import MAX_NATS
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import is_file
from spkv_nas.base.tables import Column, read_table, write_csv

_COLUMNS = (
    Column("layer", "whole"),
    Column("kv_head", "whole"),
    Column("gain", "number", low=-MAX_NATS, high=MAX_NATS),
    Column("standard_error", "number", high=MAX_NATS, gaps=True),
)
_REMEDY = "probe again, or remove it: only what propose says of trust needs it"


@dataclass(frozen=True, eq=False)
class Gains:
    """NLL that making each head global on its own saves, in nats per token.

    Attributes:
        values: [L, Hkv]; negative if a head does harm, or appears to by chance.
        standard_error: [L, Hkv], clustered by document; NaN for a single document.
    """

    values: NDArray[np.float64]
    standard_error: NDArray[np.float64]

    @classmethod
    def read(cls, path: Path, grid: Grid) -> Gains | None:
        """Read the gains from a file; None if it does not exist.

        Raises:
            UserError: the table is invalid, naming file and line, or does not list each head of ``grid`` once.
        """
        if not is_file(path):
            return None
        rows = read_table(path, "gains", _COLUMNS)
        # Check that each head of the grid occurs once
        heads = rows[["layer", "kv_head"]]
        outside = ((heads >= list(grid)).any(axis=1) | heads.duplicated()).to_numpy()
        if outside.any():
            where = f", line {rows.index[int(outside.argmax())]}"
            raise UserError(f"gains {path}{where}: expected each head of {grid_words(grid)} once\n{_REMEDY}")
        if len(rows) != grid[0] * grid[1]:
            raise UserError(f"gains {path}: {len(rows)} heads, but the table has {grid_words(grid)}\n{_REMEDY}")
        # Arrange the rows as a grid
        rows = rows.sort_values(["layer", "kv_head"])
        return cls(rows["gain"].to_numpy().reshape(grid), rows["standard_error"].to_numpy().reshape(grid))

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        layer, head = (axis.ravel() for axis in np.indices(self.values.shape))
        columns = (layer, head, self.values.ravel(), self.standard_error.ravel())
        write_csv(path, pd.DataFrame(dict(zip((column.name for column in _COLUMNS), columns, strict=True))))
