"""Tables of numbers per KV head: scores (``density.csv``), and what lies beside them.

The column of the scores is called ``density`` in a table of densities and ``score`` in one of another kind; in memory,
it is ``score`` in both. Gains in nats are signed, because a head may do harm, or appear to by chance; other scores are
in [0, 1]. ``HeadScores.values`` keeps the sign and ranks heads; ``HeadScores.density``, whose shares add up to
coverage, clips negative scores to 0, after the mean over domains: before it, the noise of useless heads would add up to
a gain.

``gains.csv`` validates the ranking: the gain of a head is the NLL, in nats per token, that its global attention saves
in a model whose other heads are all local (signal ``add-one-head`` of ``probing.gains``). Such gains, of a few thousand
tokens, are noisy and ignore interactions, so they only validate a table as a whole and name what it clearly misses.
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from spkv_nas.artifacts.grid import Grid, grid_words
from spkv_nas.artifacts.kinds import DENSITY, GAIN, KINDS, SCORE
from spkv_nas.base import files, limits
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.tables import MAX_BYTES, Column, read_table, write_csv

MAX_NATS = 1e3  # bound of gains and of their standard errors
_MAX_SIZE = {GAIN: MAX_NATS, SCORE: limits.MAX_SHOWN}  # by kind: bound of signed scores; others are in [0, 1]
_SCORE = "score"  # the column in memory
_SCORE_COLUMNS = (
    Column("layer", "whole"),
    Column("kv_head", "whole"),
    Column(_SCORE, "number", high=1.0),
    Column("domain", default="all"),
    Column("num_tokens", "whole", low=1, default="1"),
    Column("num_documents", "whole", default="0"),
    Column("standard_error", "number", high=MAX_NATS, default="", gaps=True),
)
COLUMNS = tuple(column.name for column in _SCORE_COLUMNS)
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
_GAIN_COLUMNS = (
    Column("layer", "whole"),
    Column("kv_head", "whole"),
    Column("gain", "number", low=-MAX_NATS, high=MAX_NATS),
    Column("standard_error", "number", high=MAX_NATS, gaps=True),
)
_GAIN_REMEDY = "probe again, or remove it: only what propose says of trust needs it"


def file_rows(rows: pd.DataFrame, kind: str = DENSITY) -> pd.DataFrame:
    """Return rows as a file of a kind has them: the columns ``COLUMNS``, the scores under the name of the kind."""
    return rows[list(COLUMNS)].rename(columns={_SCORE: _column(kind)})


def array_rows(values: ArrayLike, kind: str) -> pd.DataFrame:
    """Return the rows of scores [L, Hkv] of one domain. Raises ``UserError`` for another shape, kind or range."""
    # Check shape, kind and range
    try:
        scores = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"scores must be an array of numbers [layers, KV heads]: {first_line(error)}") from error
    if scores.ndim != 2 or not scores.size or kind not in KINDS:
        raise UserError(
            f"expected scores [layers, KV heads] of kind {', '.join(KINDS)}; found {list(scores.shape)} of kind {kind}"
        )
    high = _MAX_SIZE.get(kind)
    low, high = (0.0, 1.0) if high is None else (-high, high)
    if not ((low <= scores) & (scores <= high)).all():
        raise UserError(f"scores of kind {kind} must be numbers between {low:g} and {high:g}")
    # List the heads as rows
    layers, heads = np.indices(scores.shape).reshape(2, -1)
    columns = (layers, heads, scores.ravel(), "all", 1, 0, np.nan)
    return pd.DataFrame(dict(zip(COLUMNS, columns, strict=True)))


def read_rows(file: Path, kind: str | None = None) -> tuple[pd.DataFrame, str]:
    """Read the rows of ``density.csv``, with the columns ``COLUMNS``, and return them with the kind of the scores.

    ``kind`` is None without a record: scores if the table has a column of that name, else densities. Raises
    ``UserError``, naming file and line, if the table is invalid.
    """
    what = "density table"
    # Find the column of the scores, in the header if there is no record
    if kind is None:
        lines = files.read_text(file, what, max_bytes=MAX_BYTES).splitlines()
        header = [cell.strip() for cell in next(csv.reader(lines[:1]), [])]
        kind = SCORE if _SCORE in header else DENSITY
    name = _column(kind)
    # Read and check the rows
    rows = read_table(file, what, [_declared(column, kind, name) for column in _SCORE_COLUMNS])
    where = f"{what} {file}"
    duplicate = rows.duplicated(["layer", "kv_head", "domain"])
    if duplicate.any():
        line = rows.index[int(duplicate.to_numpy().argmax())]
        raise UserError(
            f"{where}, line {line}: layer {rows['layer'][line]}, KV head {rows['kv_head'][line]} occurs twice"
        )
    _check_complete(rows, where)
    return rows.rename(columns={name: _SCORE}).reset_index(drop=True), kind


def _column(kind: str) -> str:
    """Return the name of the scores' column in a file."""
    return DENSITY if kind == DENSITY else _SCORE


def _declared(column: Column, kind: str, name: str) -> Column:
    """Return the declaration of a column for scores of a kind, whose column is called ``name``."""
    most = _MAX_SIZE.get(kind)
    if column.name == _SCORE:
        return replace(column, name=name) if most is None else replace(column, name=name, low=-most, high=most)
    return replace(column, high=max(most or 0.0, MAX_NATS)) if column.name == "standard_error" else column


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


def read_positions(path: Path, grid: Grid) -> pd.DataFrame | None:
    """Read the density by position, None without a file. Raises ``UserError`` if a head is outside ``grid``."""
    if not files.is_file(path):
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
    """Read the density log of a run; ``UserError`` if it lists a head twice at one step."""
    rows = read_table(path, "density log", _LOG_COLUMNS)
    repeated = rows.duplicated(["step", "layer", "kv_head"])
    if repeated.any():
        line = rows.index[int(repeated.to_numpy().argmax())]
        raise UserError(f"density log {path}, line {line}: a head occurs twice at one step")
    return rows.reset_index(drop=True)


@dataclass(frozen=True, eq=False)
class Gains:
    """NLL that making each head global on its own saves, in nats per token."""

    values: NDArray[np.float64]  # [L, Hkv]; negative if a head does harm, or appears to by chance
    standard_error: NDArray[np.float64]  # [L, Hkv], clustered by document; NaN for a single document

    @classmethod
    def read(cls, path: Path, grid: Grid) -> "Gains | None":
        """Read the gains, None if there is no file; ``UserError`` unless it lists each head of ``grid`` once."""
        if not files.is_file(path):
            return None
        rows = read_table(path, "gains", _GAIN_COLUMNS)
        # Check that each head of the grid occurs once
        heads = rows[["layer", "kv_head"]]
        outside = ((heads >= list(grid)).any(axis=1) | heads.duplicated()).to_numpy()
        if outside.any():
            where = f", line {rows.index[int(outside.argmax())]}"
            raise UserError(f"gains {path}{where}: expected each head of {grid_words(grid)} once\n{_GAIN_REMEDY}")
        if len(rows) != grid[0] * grid[1]:
            raise UserError(f"gains {path}: {len(rows)} heads, but the table has {grid_words(grid)}\n{_GAIN_REMEDY}")
        # Arrange the rows as a grid
        rows = rows.sort_values(["layer", "kv_head"])
        return cls(rows["gain"].to_numpy().reshape(grid), rows["standard_error"].to_numpy().reshape(grid))

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        layer, head = (axis.ravel() for axis in np.indices(self.values.shape))
        columns = (layer, head, self.values.ravel(), self.standard_error.ravel())
        write_csv(path, pd.DataFrame(dict(zip((column.name for column in _GAIN_COLUMNS), columns, strict=True))))
