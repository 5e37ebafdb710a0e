"""Tables of numbers per KV head: scores (``density.csv``), and what lies beside them.

The column of the scores is called ``density`` in a table of densities and ``score`` in one of another kind; in memory,
it is ``score`` in both. Gains in nats are signed, because a head may do harm, or appear to by chance; other scores are
in [0, 1]. ``HeadScores.values`` keeps the sign and ranks heads; ``HeadScores.density``, whose shares add up to
coverage, clips negative scores to 0, after the mean over domains: before it, the noise of useless heads would add up to
a gain.

``gains.csv`` validates the ranking: the gain of a head is the NLL, in nats per token, that its global attention saves
in a model whose other heads are all local (signal ``add-one-head`` of ``probing.gains``). Such gains, of a few thousand
tokens, are noisy and ignore interactions, so they only validate a table as a whole and name what it clearly misses.

``windows.csv`` has what each window of local heads costs each KV head.
"""

import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from spkv_nas.artifacts.grid import check_grid, grid_words, head_cells
from spkv_nas.artifacts.kinds import DENSITY, GAIN, KINDS, SCORE
from spkv_nas.base import arrays, files, limits
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.tables import MAX_BYTES, Column, read_table, write_csv

MAX_NATS = 1e3  # bound of gains, of their standard errors, and of costs
# By kind: bound of signed scores; others are in [0, 1]
_MAX_SIZE = {GAIN: MAX_NATS, SCORE: limits.MAX_SHOWN}
_SCORE = "score"  # the column in memory
_HEAD_COLUMNS = (Column("layer", "whole"), Column("kv_head", "whole"))
_SCORE_COLUMNS = (
    *_HEAD_COLUMNS,
    Column(_SCORE, "number", high=1.0),
    Column("domain", default="all"),
    Column("num_tokens", "whole", low=1, default="1"),
    Column("num_documents", "whole", default="0"),
    Column("standard_error", "number", high=MAX_NATS, default="", gaps=True),
)
COLUMNS = tuple(column.name for column in _SCORE_COLUMNS)
_POSITION_COLUMNS = (
    *_HEAD_COLUMNS,
    Column("start", "whole"),
    Column("end", "whole"),
    Column("density", "number", high=1.0),
    Column("num_tokens", "whole"),
)
_LOG_COLUMNS = (
    Column("step", "number", high=1e15),
    *_HEAD_COLUMNS,
    Column("density", "number", high=1.0),
)
_GAIN_COLUMNS = (
    *_HEAD_COLUMNS,
    Column("gain", "number", low=-MAX_NATS, high=MAX_NATS),
    Column("standard_error", "number", high=MAX_NATS, gaps=True),
)
_WINDOW_COLUMNS = (
    *_HEAD_COLUMNS,
    Column("domain"),
    Column("window", "whole", low=1, high=limits.MAX_WINDOW),
    Column("cost", "number", low=-MAX_NATS, high=MAX_NATS),
)
_WINDOW_ORDER = ["domain", "layer", "kv_head", "window"]
_GAIN_REMEDY = "probe again, or remove it: only what propose says of trust needs it"


def file_rows(rows: pd.DataFrame, kind: str = DENSITY) -> pd.DataFrame:
    """Return rows as a file of a kind has them: the columns ``COLUMNS``, the scores under the name of the kind."""
    return rows[list(COLUMNS)].rename(columns={_SCORE: _column(kind)})


def array_rows(values: ArrayLike, kind: str) -> pd.DataFrame:
    """Return the rows of scores [L, Hkv], NaN beyond the heads of a layer; ``UserError`` for other shapes or ranges."""
    # Check shape, kind and range
    try:
        scores = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"scores must be an array of numbers [layers, KV heads]: {first_line(error)}"
        ) from error
    if scores.ndim != 2 or not scores.size or kind not in KINDS:
        raise UserError(
            f"expected scores [layers, KV heads] of kind {', '.join(KINDS)}; found "
            f"{list(scores.shape)} of kind {kind}"
        )
    high = _MAX_SIZE.get(kind)
    low, high = (0.0, 1.0) if high is None else (-high, high)
    # Layers have fewer heads where NaN fills the end of a row, but at least one
    num_heads = np.where(np.isnan(scores), 0, np.arange(1, scores.shape[1] + 1)).max(1)
    is_absent = np.arange(scores.shape[1]) >= np.maximum(num_heads, 1)[:, None]
    if not ((low <= scores) & (scores <= high) | is_absent).all():
        raise UserError(f"scores of kind {kind} must be numbers between {low:g} and {high:g}")
    # List the heads as rows
    layers, heads = np.nonzero(~is_absent)
    columns = (layers, heads, scores[layers, heads], "all", 1, 0, np.nan)
    return pd.DataFrame(dict(zip(COLUMNS, columns, strict=True)))


def read_rows(
    file: Path, kind: str | None, heads_per_layer: Sequence[int] | None
) -> tuple[pd.DataFrame, str]:
    """Read the rows of ``density.csv``, with the columns ``COLUMNS``, and return them with the kind of the scores.

    ``kind`` is None without a record: scores if the table has a column of that name, else densities. A record says the
    ``heads_per_layer`` if they differ; None: every layer has the same number. Raises ``UserError``, naming file and
    line, if the table is invalid.
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
            f"{where}, line {line}: layer {rows['layer'][line]}, KV head {rows['kv_head'][line]} "
            "occurs twice"
        )
    _check_complete(rows, where, heads_per_layer)
    return rows.rename(columns={name: _SCORE}).reset_index(drop=True), kind


def _column(kind: str) -> str:
    """Return the name of the scores' column in a file."""
    return DENSITY if kind == DENSITY else _SCORE


def _declared(column: Column, kind: str, name: str) -> Column:
    """Return the declaration of a column for scores of a kind, whose column is called ``name``."""
    most = _MAX_SIZE.get(kind)
    if column.name == "standard_error":
        return replace(column, high=max(most or 0.0, MAX_NATS))
    if column.name != _SCORE:
        return column
    if most is None:
        return replace(column, name=name)
    return replace(column, name=name, low=-most, high=most)


def _check_complete(rows: pd.DataFrame, where: str, heads_per_layer: Sequence[int] | None) -> None:
    """Check that every domain has every head of the grid."""
    layers = int(rows["layer"].max()) + 1
    heads = int(rows["kv_head"].max()) + 1
    total = sum(heads_per_layer) if heads_per_layer else layers * heads
    for domain, domain_rows in rows.groupby("domain"):
        present = set(zip(domain_rows["layer"], domain_rows["kv_head"], strict=True))
        num_absent = total - len(present)
        if num_absent > 0:
            # Find the first gap only: one mistyped layer can make the grid huge
            sizes = heads_per_layer or itertools.repeat(heads, layers)
            cells = ((layer, head) for layer, size in enumerate(sizes) for head in range(size))
            layer, head = next(cell for cell in cells if cell not in present)
            raise UserError(
                f"{where}: {num_absent} of {total} heads are missing in domain '{domain}', "
                f"starting with layer {layer}, KV head {head}; the grid must be complete from 0"
            )
    if heads_per_layer:
        check_grid(where, rows.groupby("layer")["kv_head"].max() + 1, "its record", heads_per_layer)


def _are_heads(rows: pd.DataFrame, heads_per_layer: Sequence[int]) -> "pd.Series[bool]":
    """Return whether the columns layer and kv_head of each row name a head of the layers."""
    return rows["kv_head"] < rows["layer"].map(dict(enumerate(heads_per_layer)))


def read_positions(path: Path, heads_per_layer: Sequence[int]) -> pd.DataFrame | None:
    """Read the density by position, None without a file. Raises ``UserError`` if the layers have no such head."""
    if not files.is_file(path):
        return None
    rows = read_table(path, "positions", _POSITION_COLUMNS)
    # Check the heads and the ranges of positions
    is_invalid = ~_are_heads(rows, heads_per_layer) | (rows["start"] >= rows["end"])
    if is_invalid.any():
        line = rows.index[int(is_invalid.to_numpy().argmax())]
        raise UserError(
            f"positions {path}, line {line}: expected a head of {grid_words(heads_per_layer)}, and "
            "a start before the end\n"
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


def on_grid(values: NDArray[np.float64], heads_per_layer: Sequence[int]) -> NDArray[np.float64]:
    """Arrange values [..., heads] by layer and head as [..., L, Hkv], with NaN beyond the heads of a layer."""
    is_head = head_cells(heads_per_layer)
    arranged = np.full((*values.shape[:-1], *is_head.shape), np.nan)
    arranged[..., is_head] = values
    return arranged


@dataclass(frozen=True, eq=False)
class Gains:
    """NLL that making each head global on its own saves, in nats per token."""

    # [L, Hkv]; negative if a head does harm, or appears to by chance; NaN beyond the heads of a layer
    values: NDArray[np.float64]
    # [L, Hkv], clustered by document; NaN for a single document
    standard_error: NDArray[np.float64]

    @classmethod
    def read(cls, path: Path, heads_per_layer: Sequence[int]) -> "Gains | None":
        """Read the gains, None if there is no file; ``UserError`` unless it lists each head of the layers once."""
        if not files.is_file(path):
            return None
        rows = read_table(path, "gains", _GAIN_COLUMNS)
        # Check that each head of the grid occurs once
        heads = rows[["layer", "kv_head"]]
        outside = (~_are_heads(rows, heads_per_layer) | heads.duplicated()).to_numpy()
        words = grid_words(heads_per_layer)
        if outside.any():
            where = f", line {rows.index[int(outside.argmax())]}"
            raise UserError(
                f"gains {path}{where}: expected each head of {words} once\n{_GAIN_REMEDY}"
            )
        if len(rows) != sum(heads_per_layer):
            raise UserError(
                f"gains {path}: {len(rows)} heads, but the table has {words}\n{_GAIN_REMEDY}"
            )
        # Arrange the rows as a grid
        rows = rows.sort_values(["layer", "kv_head"])
        return cls(
            values=on_grid(rows["gain"].to_numpy(), heads_per_layer),
            standard_error=on_grid(rows["standard_error"].to_numpy(), heads_per_layer),
        )

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        layer, head = np.nonzero(~np.isnan(self.values))
        columns = {
            "layer": layer,
            "kv_head": head,
            "gain": self.values[layer, head],
            "standard_error": self.standard_error[layer, head],
        }
        write_csv(path, pd.DataFrame(columns))


@dataclass(frozen=True, eq=False)
class WindowCosts:
    """Cost of each window to each KV head against global attention, in nats per token, to second order."""

    windows: tuple[int, ...]  # the windows, ascending, in keys
    # float64 [P, L, Hkv, W], cost by domain; negative if a head attends better locally, or appears to by chance; 0 in
    # layers that are local by design, and NaN beyond the heads of a layer
    values: arrays.Float
    domains: tuple[str, ...]  # names of the domains, sorted

    @property
    def falling(self) -> arrays.Float:
        """Return the costs [P, L, Hkv, W] without what is noise: at least 0, and none below that of a wider window.

        A program that minimises sums of costs would otherwise choose the heads whose costs are wrong by most.
        """
        from_widest = np.maximum(self.values, 0.0)[..., ::-1]
        return np.maximum.accumulate(from_widest, -1)[..., ::-1]

    def at(self, window: int) -> arrays.Float:
        """Return the costs [P, L, Hkv] of any window, interpolated in its logarithm between those measured."""
        last = len(self.windows) - 1
        position = np.interp(np.log2(window), np.log2(self.windows), np.arange(last + 1))
        lower = min(int(position), max(last - 1, 0))
        upper = min(lower + 1, last)
        share = position - lower
        costs = (1.0 - share) * self.values[..., lower] + share * self.values[..., upper]
        return np.asarray(costs)

    def only(self, windows: tuple[int, ...]) -> "WindowCosts":
        """Return the costs of some windows, interpolated where they were not measured."""
        chosen = tuple(sorted(set(windows)))
        values = np.stack([self.at(window) for window in chosen], -1)
        return WindowCosts(chosen, values, self.domains)

    @classmethod
    def read(
        cls, path: Path, heads_per_layer: Sequence[int], domains: tuple[str, ...]
    ) -> "WindowCosts | None":
        """Read the costs, None without a file; ``UserError`` unless they have every head, domain and window once."""
        if not files.is_file(path):
            return None
        rows = read_table(path, "window costs", _WINDOW_COLUMNS).sort_values(_WINDOW_ORDER)
        windows = tuple(int(window) for window in sorted(rows["window"].unique()))
        heads = [
            (layer, head) for layer, number in enumerate(heads_per_layer) for head in range(number)
        ]
        product = itertools.product(domains, heads, windows)
        expected = pd.MultiIndex.from_tuples(
            [(domain, *head, window) for domain, head, window in product]
        )
        actual = pd.MultiIndex.from_frame(rows[_WINDOW_ORDER])
        if len(actual) != len(expected) or not (actual == expected).all():
            raise UserError(
                f"window costs {path}: expected every head of {grid_words(heads_per_layer)}, "
                "domain and window once\n"
                "probe again, or remove it: only layouts of several windows, and those for another "
                "memory, need it"
            )
        costs = rows["cost"].to_numpy().reshape(len(domains), len(heads), len(windows))
        arranged = on_grid(costs.swapaxes(1, 2), heads_per_layer)  # [P, W, L, Hkv]
        return cls(windows, np.moveaxis(arranged, 1, -1), domains)

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        domain, layer, head, window = np.nonzero(~np.isnan(self.values))
        columns = {
            "layer": layer,
            "kv_head": head,
            "domain": np.array(self.domains)[domain],
            "window": np.array(self.windows)[window],
            "cost": self.values[domain, layer, head, window],
        }
        write_csv(path, pd.DataFrame(columns))
