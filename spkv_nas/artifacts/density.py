"""The density table: what share of the keys each KV head keeps, per domain.

SP-KV paper, "Measuring sparsity": density is the share of tokens whose utility is at least tau; the window, always
kept, does not count. ``density.csv`` may be made by hand with the columns layer, kv_head, density alone.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from spkv_nas.artifacts.documents import DocumentCounts
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_yaml, write_atomic
from spkv_nas.base.schema import validate
from spkv_nas.base.tables import numbers, read_cells

COLUMNS = ("layer", "kv_head", "density", "domain", "num_tokens", "num_documents", "standard_error")
POSITION_COLUMNS = ("layer", "kv_head", "start", "end", "density", "num_tokens")
_NEARLY_OPEN = 0.9  # density above which a head kept nearly everything; below 1 - 0.9 it kept nearly nothing
_UNDIFFERENTIATED = 0.5  # more than this share of the heads on one side: the gates have not differentiated


class _ProbeFile(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    name: str | None = None
    tau: float = Field(default=0.5, ge=0, le=1)
    window: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=1)
    dtype: str | None = None


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # the strict reader refuses aliases


@dataclass(frozen=True, eq=False)
class LogitHistogram:
    """Counts of utility logits, from which the density at any threshold follows.

    Attributes:
        edges: [n + 1] bin edges, ascending.
        counts: int64 [domains, L, Hkv, n + 2]; the first and last bin hold what lies outside the edges.
        domains: names of the first axis.
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    domains: tuple[str, ...]

    def density(self, tau: float) -> NDArray[np.float64]:
        """[domains, L, Hkv] share of logits at or above logit(tau); linear within a bin."""
        total = np.maximum(self.counts.sum(-1), 1)
        if tau <= 0.0:
            return np.ones(total.shape)
        if tau >= 1.0:
            return np.zeros(total.shape)
        above = np.concatenate([self.counts[..., :0:-1].cumsum(-1)[..., ::-1], 0 * total[..., None]], -1)
        at_edge = above[..., : len(self.edges)] / total[..., None]  # share at or above each edge
        limit = min(max(math.log(tau / (1.0 - tau)), self.edges[0]), self.edges[-1])
        right = int(np.searchsorted(self.edges, limit))
        if right == 0:
            return np.asarray(at_edge[..., 0])
        share = (limit - self.edges[right - 1]) / (self.edges[right] - self.edges[right - 1])
        return np.asarray((1.0 - share) * at_edge[..., right - 1] + share * at_edge[..., right])


@dataclass(frozen=True, eq=False)
class DensityTable:
    """Density per layer, KV head and domain.

    Attributes:
        name: of the probe; the same in ``probes/``, ``layouts/`` and ``reports/``.
        rows: columns ``COLUMNS``; one row per (layer, head, domain), complete.
        tau: threshold at which ``density`` was counted.
        window: w of the gates; None when unknown (a table made by hand).
        positions: density by position in the block: layer, kv_head, start, end, density, num_tokens.
        positions_tau: threshold at which ``positions`` was counted; None: ``tau``.
        histogram: of the logits; None for a table made by hand.
        documents: counts per document at ``tau``; None for a table made by hand or by an older version.
        metadata: where the table comes from (``probe.yaml``).
    """

    name: str
    rows: pd.DataFrame
    tau: float = 0.5
    window: int | None = None
    positions: pd.DataFrame | None = None
    positions_tau: float | None = None
    histogram: LogitHistogram | None = None
    documents: DocumentCounts | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def num_layers(self) -> int:
        """Number of layers L."""
        return int(self.rows["layer"].max()) + 1

    @cached_property
    def num_kv_heads(self) -> int:
        """Number of KV heads per layer Hkv."""
        return int(self.rows["kv_head"].max()) + 1

    @property
    def num_heads(self) -> int:
        """L x Hkv."""
        return self.num_layers * self.num_kv_heads

    @property
    def signal(self) -> str:
        """What the values are: "density", or the origin of other scores read in its place (``exchange``)."""
        return str(self.metadata.get("signal", "density"))

    @property
    def tau_of_positions(self) -> float:
        """Threshold at which ``positions`` was counted."""
        return self.tau if self.positions_tau is None else self.positions_tau

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """Domains, sorted."""
        return tuple(sorted(self.rows["domain"].unique()))

    @cached_property
    def density(self) -> NDArray[np.float64]:
        """[L, Hkv], mean over domains weighted by their tokens."""
        return self._combine("density", lambda values, share: (values * share).sum(0))

    @cached_property
    def standard_error(self) -> NDArray[np.float64]:
        """[L, Hkv], by document; NaN where unknown."""
        return self._combine("standard_error", lambda values, share: np.sqrt(((values * share) ** 2).sum(0)))

    @property
    def mean(self) -> float:
        """rho: mean density over all heads (paper, "Measuring sparsity")."""
        return float(self.density.mean())

    @property
    def std(self) -> float:
        """Standard deviation of density over heads."""
        return float(self.density.std())

    def domain_density(self, domain: str) -> NDArray[np.float64]:
        """[L, Hkv] of one domain. Raises ``UserError`` for a domain the table does not have."""
        if domain not in self.domains:
            raise UserError(f"density table '{self.name}' has no domain '{domain}'; it has {', '.join(self.domains)}")
        return self._grid(self.rows[self.rows["domain"] == domain], "density")

    def at_tau(self, tau: float) -> DensityTable:
        """The same table at another threshold, from the histogram. Standard errors are not known there, and
        ``positions`` stays at the threshold of the probe.

        Raises:
            UserError: ``tau`` is outside [0, 1], or the table has no histogram.
        """
        if not 0.0 <= tau <= 1.0:
            raise UserError(f"tau must lie in [0, 1]; found {tau}")
        if tau == self.tau:
            return self
        histogram = self._need_histogram()
        grids = dict(zip(histogram.domains, histogram.density(tau), strict=True))
        rows = self.rows.copy()
        rows["density"] = [
            grids[domain][layer, head]
            for domain, layer, head in zip(rows["domain"], rows["layer"], rows["kv_head"], strict=True)
        ]
        rows["standard_error"] = np.nan
        documents = None
        if self.documents is not None:
            order = [histogram.domains.index(domain) for domain in self.documents.domains]
            documents = self.documents.at_tau(tau, lambda tau: histogram.density(tau)[order])
        return replace(self, rows=rows, tau=tau, positions_tau=self.tau_of_positions, documents=documents)

    def tau_for_density(self, rho: float) -> float:
        """The threshold whose mean density is closest to ``rho`` (share of 1). Raises ``UserError``."""
        if not 0.0 <= rho <= 1.0:
            raise UserError(f"the density to match must lie in [0, 1]; found {rho}")
        self._need_histogram()
        low, high = 0.0, 1.0
        for _ in range(60):  # the mean density falls as tau rises
            middle = (low + high) / 2
            low, high = (middle, high) if self.at_tau(middle).mean > rho else (low, middle)
        return min((low, high, (low + high) / 2), key=lambda tau: abs(self.at_tau(tau).mean - rho))

    def diagnosis(self) -> list[str]:
        """Plain sentences when the gates have not differentiated; empty when they have, and for other signals."""
        if self.signal != "density":
            return []
        sides = [
            (self.density > _NEARLY_OPEN, f"everything (density above {_NEARLY_OPEN})", "a larger tau"),
            (self.density < 1 - _NEARLY_OPEN, f"nothing (density below {1 - _NEARLY_OPEN:.1f})", "a smaller tau"),
        ]
        return [
            f"{near.mean():.0%} of the KV heads kept nearly {what}: the gates have not differentiated, so their order "
            f"says little. What helps: more gated training steps, a larger predictor learning rate, or {tau}."
            for near, what, tau in sides
            if near.mean() > _UNDIFFERENTIATED
        ]

    @classmethod
    def read(cls, path: Path) -> DensityTable:
        """Read ``density.csv`` (or its folder) and what lies beside it: ``probe.yaml``, ``positions.csv``,
        ``histogram.npz``, ``documents.npz``.

        Raises:
            UserError: naming the file, and the line where there is one.
        """
        file = path / "density.csv" if path.is_dir() else path
        rows = _read_rows(file)
        folder = file.parent
        metadata: dict[str, Any] = {}
        if file.name == "density.csv" and (folder / "probe.yaml").is_file():
            metadata = read_yaml(folder / "probe.yaml", "probe")
        own = bool(metadata)
        record = validate(_ProbeFile, metadata, f"probe {folder / 'probe.yaml'}")
        table = cls(
            name=record.name or (folder.resolve().name if file.name == "density.csv" else file.stem),
            rows=rows,
            tau=record.tau,
            window=record.window,
            positions=_read_positions(folder / "positions.csv") if own else None,
            histogram=_read_histogram(folder / "histogram.npz") if own else None,
            metadata=metadata,
        )
        return replace(table, documents=_read_documents(folder / "documents.npz", table)) if own else table

    def write(self, folder: Path) -> None:
        """Write ``density.csv``, ``probe.yaml`` and, where known, positions, histogram and counts per document.

        One that this table does not have is removed, so that an earlier probe's does not pass for this one's.
        """
        write_atomic(folder / "density.csv", self.rows[list(COLUMNS)].to_csv(index=False, float_format="%.6g"))
        if self.positions is not None and self.tau_of_positions == self.tau:
            write_atomic(folder / "positions.csv", self.positions.to_csv(index=False, float_format="%.6g"))
        else:
            (folder / "positions.csv").unlink(missing_ok=True)
        if self.histogram is not None:
            buffer = io.BytesIO()
            np.savez_compressed(
                buffer,
                edges=self.histogram.edges,
                counts=self.histogram.counts,
                domains=np.array(self.histogram.domains),
            )
            write_atomic(folder / "histogram.npz", buffer.getvalue())
        else:
            (folder / "histogram.npz").unlink(missing_ok=True)
        if self.documents is not None:
            self.documents.write(folder / "documents.npz")
        else:
            (folder / "documents.npz").unlink(missing_ok=True)
        summary = {
            "name": self.name,
            "tau": self.tau,
            "window": self.window,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "mean_density": round(self.mean, 4),
            "std_density": round(self.std, 4),
        }
        content = yaml.dump({**self.metadata, **summary}, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)
        write_atomic(folder / "probe.yaml", content)

    def _need_histogram(self) -> LogitHistogram:
        if self.histogram is None:
            raise UserError(
                f"density table '{self.name}' has no histogram of utilities, so its density is known at "
                f"tau = {self.tau:g} alone\nprobe the model again to choose another tau"
            )
        return self.histogram

    def _grid(self, rows: pd.DataFrame, column: str) -> NDArray[np.float64]:
        grid = np.full((self.num_layers, self.num_kv_heads), np.nan)
        grid[rows["layer"].to_numpy(), rows["kv_head"].to_numpy()] = rows[column].to_numpy()
        return grid

    def _combine(self, column: str, reduce: Any) -> NDArray[np.float64]:
        parts = [self.rows[self.rows["domain"] == domain] for domain in self.domains]
        tokens = np.stack([self._grid(part, "num_tokens") for part in parts])
        values = np.stack([self._grid(part, column) for part in parts])
        return np.asarray(reduce(values, tokens / tokens.sum(0)))


def _read_histogram(path: Path) -> LogitHistogram | None:
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return LogitHistogram(arrays["edges"], arrays["counts"], tuple(str(d) for d in arrays["domains"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged: {error}\nprobe again, or remove it: only --tau needs it") from error


def _read_documents(path: Path, table: DensityTable) -> DocumentCounts | None:
    counts = DocumentCounts.read(path, table.domains, (table.num_layers, table.num_kv_heads))
    if counts is not None:
        density = np.stack([table.domain_density(domain) for domain in table.domains])
        if not np.allclose(counts.density(), density, rtol=0, atol=1e-5):
            raise UserError(
                f"{path} does not add up to the densities of the table beside it\n"
                "probe again, or remove it: only intervals need it"
            )
    return counts


def _read_positions(path: Path) -> pd.DataFrame | None:
    if not path.is_file():
        return None
    cells = read_cells(path, "density table", POSITION_COLUMNS, POSITION_COLUMNS)
    parsed = pd.DataFrame(index=cells.index)
    for column in POSITION_COLUMNS:
        whole = column != "density"
        values = numbers(cells[column], f"positions {path}", whole=whole, high=math.inf if whole else 1.0)
        parsed[column] = values.astype(int) if whole else values
    return parsed.reset_index(drop=True)


def _read_rows(file: Path) -> pd.DataFrame:
    """The rows of a density CSV, complete with default columns. Raises ``UserError`` naming file and line."""
    where = f"density table {file}"
    rows = read_cells(file, "density table", COLUMNS[:3], COLUMNS)
    for column, fallback in (("domain", "all"), ("num_tokens", "1"), ("num_documents", "0"), ("standard_error", "")):
        if column not in rows:
            rows[column] = fallback
    parsed = pd.DataFrame({"domain": rows["domain"]})
    for column, low in (("layer", 0), ("kv_head", 0), ("num_tokens", 1), ("num_documents", 0)):
        parsed[column] = numbers(rows[column], where, whole=True, low=low).astype(int)
    parsed["density"] = numbers(rows["density"], where, high=1.0)
    known = rows["standard_error"] != ""
    parsed["standard_error"] = np.nan
    parsed.loc[known, "standard_error"] = numbers(rows["standard_error"][known], where)
    duplicate = parsed.duplicated(["layer", "kv_head", "domain"])
    if duplicate.any():
        line = parsed.index[int(duplicate.to_numpy().argmax())]
        layer, head = parsed["layer"][line], parsed["kv_head"][line]
        raise UserError(f"{where}, line {line}: layer {layer}, KV head {head} is there twice")
    _check_complete(parsed, where)
    return parsed[list(COLUMNS)].reset_index(drop=True)


def _check_complete(rows: pd.DataFrame, where: str) -> None:
    layers, heads = int(rows["layer"].max()) + 1, int(rows["kv_head"].max()) + 1
    for domain, part in rows.groupby("domain"):
        there = set(zip(part["layer"], part["kv_head"], strict=True))
        absent = layers * heads - len(there)
        if absent:  # one mistyped layer can make the grid huge: look for the first hole only
            grid = ((layer, head) for layer in range(layers) for head in range(heads))
            first = next(place for place in grid if place not in there)
            raise UserError(
                f"{where}: {absent} of {layers * heads} heads are missing in domain '{domain}', the first being "
                f"layer {first[0]}, KV head {first[1]}; the grid must be complete from 0"
            )
