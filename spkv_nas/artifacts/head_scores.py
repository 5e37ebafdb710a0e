"""The density table: what share of the keys each KV head keeps, per domain.

SP-KV paper, "Measuring sparsity": density is the share of tokens whose utility is at least tau; the window, always
kept, does not count. ``density.csv`` may be made by hand with the columns layer, kv_head, density alone. Scores of
another kind take the place of densities where ``HeadScores.signal`` says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, field_validator

from spkv_nas.artifacts.diagnosis import FROZEN, missed_price, undifferentiated
from spkv_nas.artifacts.document_counts import DocumentCounts
from spkv_nas.artifacts.gains import Gains
from spkv_nas.artifacts.grid import Grid, grid_words
from spkv_nas.artifacts.head_score_rows import COLUMNS, read_rows
from spkv_nas.artifacts.histogram import LogitHistogram, sigmoid
from spkv_nas.artifacts.score_kind import Measure
from spkv_nas.artifacts.views import grid_html, picture
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import StrPath, is_file, is_folder
from spkv_nas.base.limits import MOST_SIZE, MOST_WINDOW
from spkv_nas.base.names import check_name
from spkv_nas.base.records import read_record, write_record
from spkv_nas.base.replace import replacing, settle
from spkv_nas.base.schema import Section, validate
from spkv_nas.base.tables import Column, csv_text, read_table, write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POSITION_COLUMNS = (
    Column("layer", "whole"),
    Column("kv_head", "whole"),
    Column("start", "whole"),
    Column("end", "whole"),
    Column("density", "number", high=1.0),
    Column("num_tokens", "whole"),
)
_TABLE, RECORD = "density.csv", "probe.yaml"
_POSITIONS, _HISTOGRAM, _DOCUMENTS, _GAINS = "positions.csv", "histogram.npz", "documents.npz", "gains.csv"


class _ProbeFile(Section):
    model_config = ConfigDict(extra="allow")

    name: str | None = None
    tau: float = Field(default=0.5, ge=0, le=1)
    window: int | None = Field(default=None, ge=1, le=MOST_WINDOW)
    head_dim: int | None = Field(default=None, ge=1, le=MOST_SIZE)
    dtype: str | None = None
    unit: str | None = None
    target_density: float | None = Field(default=None, gt=0, lt=1)
    reached_density: float | None = Field(default=None, ge=0, le=1)
    mean_density: float | None = None
    price: float | None = None

    @field_validator("name")
    @classmethod
    def _can_name_a_file(cls, name: str | None) -> str | None:
        return name if name is None else check_name(name, "the probe")


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Density per layer, KV head and domain.

    A table is of one threshold; ``at_tau`` gives it at another, where the histogram is known.

    Attributes:
        name: of the probe; the same in ``probes/``, ``layouts/`` and ``reports/``.
        rows: columns ``COLUMNS``; one row per (layer, head, domain), complete. ``num_tokens`` and ``num_documents`` are
            those of the domain, ``standard_error`` is that of the density, by document.
        tau: threshold at which ``density`` was counted.
        window: w of the gates; None when unknown (a table made by hand).
        positions: density by position in the block: layer, kv_head, start, end (tokens), density, num_tokens.
        positions_tau: threshold at which ``positions`` was counted; None: ``tau``.
        histogram: of the logits; None for a table made by hand.
        documents: counts per document at ``tau``; None for a table made by hand or by an older version.
        metadata: where the table comes from (``probe.yaml``).
        probe_hash: ``content_hash`` of the table at the probe's threshold; None: its own.
        gains: what each head saves by itself, to judge the table by; None where that was not measured.
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
    probe_hash: str | None = None
    gains: Gains | None = None

    @cached_property
    def num_layers(self) -> int:
        """Number of layers L."""
        return int(self.rows["layer"].max()) + 1

    @cached_property
    def num_kv_heads(self) -> int:
        """Number of KV heads per layer Hkv."""
        return int(self.rows["kv_head"].max()) + 1

    @property
    def grid(self) -> Grid:
        """(L, Hkv)."""
        return self.num_layers, self.num_kv_heads

    @property
    def num_heads(self) -> int:
        """L x Hkv."""
        return self.num_layers * self.num_kv_heads

    @property
    def signal(self) -> str:
        """What the values are: "density", or the name of what else was probed or read, such as "duo-attention"."""
        return str(self.metadata.get("signal", "density"))

    @property
    def is_density(self) -> bool:
        """Whether the values are densities, which a threshold cuts."""
        return self.signal == "density"

    @cached_property
    def measure(self) -> Measure:
        """Name, unit and shades of the values."""
        return Measure.of(self.signal, self.metadata.get("unit"), self.values)

    @property
    def priced_at(self) -> float | None:
        """Share of the keys that the gates' price was to keep, in (0, 1); None where there was no such target."""
        target = self.metadata.get("target_density")
        return None if target is None else float(target)

    @property
    def missed_price(self) -> str | None:
        """A sentence where the gates miss the density that their price was to reach; else None."""
        reached = self.metadata.get("reached_density", self.metadata.get("mean_density"))  # the latter in older probes
        learned = self.metadata.get("training") != FROZEN
        return missed_price(self.priced_at, reached, weights_learned=learned) if self.is_density else None

    @property
    def is_priced(self) -> bool:
        """Whether keys had a price while the gates learned: density then tells need, not the number of useful keys."""
        return bool(self.metadata.get("price")) or self.priced_at is not None

    @property
    def tau_of_positions(self) -> float:
        """Threshold at which ``positions`` was counted."""
        return self.tau if self.positions_tau is None else self.positions_tau

    @cached_property
    def content_hash(self) -> str:
        """8 hexadecimal digits that change with what was probed: tell one probe from another of the same name.

        The same in memory as read from the files, and at every threshold.
        """
        if self.probe_hash is not None:
            return self.probe_hash
        key = hashlib.sha256(f"{self.tau} {self.window}\n{csv_text(self.rows[list(COLUMNS)])}".encode())
        if self.histogram is not None:
            key.update(self.histogram.counts.astype("<i8").tobytes())
        return key.hexdigest()[:8]

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """Domains, sorted."""
        return tuple(sorted(self.rows["domain"].unique()))

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """[L, Hkv], mean over domains weighted by their tokens; those of a signal in nats may be below 0."""
        return self._combine("density", lambda values, share: (values * share).sum(0))

    @cached_property
    def density(self) -> NDArray[np.float64]:
        """[L, Hkv], ``values``, and 0 where they are below."""
        return self.values.clip(0.0)

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

    def domain_density(self, domain: str, *, signed: bool = False) -> NDArray[np.float64]:
        """[L, Hkv] of one domain, 0 where below unless ``signed``. Raises ``UserError`` for a domain not there."""
        if domain not in self.domains:
            raise UserError(f"density table '{self.name}' has no domain '{domain}'; it has {', '.join(self.domains)}")
        values = self._on_grid(self.rows[self.rows["domain"] == domain], "density")
        return values if signed else values.clip(0.0)

    def at_tau(self, tau: float) -> HeadScores:
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
        return replace(
            self, rows=rows, tau=tau, positions_tau=self.tau_of_positions, probe_hash=self.content_hash,
            documents=documents,
        )  # fmt: skip

    def tau_for_density(self, rho: float) -> float:
        """The threshold whose mean density is closest to ``rho`` (share of 1), of those at which anything is kept.

        Raises:
            UserError: ``rho`` is outside [0, 1], or the table has no histogram.
        """
        if not 0.0 <= rho <= 1.0:
            raise UserError(f"the density to match must lie in [0, 1]; found {rho}")
        histogram = self._need_histogram()
        tokens = self.rows.groupby("domain")["num_tokens"].first()
        share = [float(tokens.get(domain, 0)) / tokens.sum() for domain in histogram.domains]

        def mean(tau: float) -> float:
            return float(np.tensordot(share, histogram.density(tau), 1).mean())

        low, high = histogram.logit_range
        for _ in range(60):  # the mean density falls as tau rises
            middle = (low + high) / 2
            low, high = (middle, high) if mean(sigmoid(middle)) > rho else (low, middle)
        means = {tau: mean(tau) for tau in (sigmoid(low), sigmoid(high), 0.0)}
        return min((tau for tau in means if means[tau] > 0), key=lambda tau: abs(means[tau] - rho))

    def diagnosis(self) -> list[str]:
        """Plain sentences when the gates missed their price or have not differentiated; empty for other signals."""
        if not self.is_density:
            return []
        missed = [] if self.missed_price is None else [self.missed_price]
        return missed + undifferentiated(self.density, is_priced=self.is_priced)

    def _repr_html_(self) -> str:
        """In a notebook: every KV head's density in percent, or what else the values are."""
        scale, at = self.measure.scale, f", at tau {self.tau:g}" if self.is_density else ""
        texts = [[scale.text(value) for value in row] for row in self.values]
        caption = f"{self.name}: {self.measure.noun}, {self.measure.shown}{at}; mean {scale.factor * self.mean:.1f}"
        return grid_html(caption, scale.fraction(self.values), texts)

    def plot(self) -> Figure:
        """The same as a matplotlib figure, as in the report. Raises ``UserError`` where matplotlib is not installed."""
        return picture("of_table", self)

    @classmethod
    def read(cls, path: StrPath) -> HeadScores:
        """Read ``density.csv`` (or its folder) and what lies beside it: ``probe.yaml``, ``positions.csv``,
        ``histogram.npz``, ``documents.npz``, ``gains.csv``.

        Raises:
            UserError: naming the file, and the line where there is one; a file beside the table that is damaged or not
                the table's.

        Warns:
            UserWarning: a table or ``probe.yaml`` was edited after they were written.
        """
        path = Path(path)
        file = path / _TABLE if is_folder(path) else path
        folder = file.parent
        settle(folder)
        metadata: dict[str, Any] = {}
        if file.name == _TABLE and is_file(folder / RECORD):
            metadata = read_record(folder / RECORD, "probe")
        own = bool(metadata)
        record = validate(_ProbeFile, metadata, f"probe {folder / RECORD}")
        rows = read_rows(file, record.unit)
        table = cls(
            name=record.name or (folder.resolve().name if file.name == _TABLE else file.stem),
            rows=rows,
            tau=record.tau,
            window=record.window,
            metadata=metadata,
        )
        if not own:
            return table
        return replace(
            table,
            positions=_read_positions(folder / _POSITIONS, table.grid),
            histogram=LogitHistogram.read(folder / _HISTOGRAM, table.domains, table.grid),
            documents=_read_documents(folder / _DOCUMENTS, table),
            gains=Gains.read(folder / _GAINS, table.grid),
        )

    def write(self, folder: StrPath) -> None:
        """Write ``density.csv``, ``probe.yaml`` and, where known, positions, histogram, counts per document, gains.

        All together take the place of an earlier probe's; one that this table does not have is removed, so that an
        earlier probe's does not pass for this one's.
        """
        own = {
            "name": self.name,
            "tau": self.tau,
            "window": self.window,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "mean_density": round(self.mean, 4 if self.is_density else 6),
            "std_density": round(self.std, 4 if self.is_density else 6),
        }
        with replacing(Path(folder), stale=(_POSITIONS, _HISTOGRAM, _DOCUMENTS, _GAINS)) as new:
            write_csv(new / _TABLE, self.rows[list(COLUMNS)])
            if self.positions is not None and self.tau_of_positions == self.tau:
                write_csv(new / _POSITIONS, self.positions)
            if self.histogram is not None:
                self.histogram.write(new / _HISTOGRAM)
            if self.documents is not None:
                self.documents.write(new / _DOCUMENTS)
            if self.gains is not None:
                self.gains.write(new / _GAINS)
            write_record(new / RECORD, {**self.metadata, **own})

    def _need_histogram(self) -> LogitHistogram:
        if self.histogram is None:
            raise UserError(
                f"density table '{self.name}' has no histogram of utilities, so its density is known at "
                f"tau = {self.tau:g} alone\nprobe the model again to choose another tau"
            )
        return self.histogram

    def _on_grid(self, rows: pd.DataFrame, column: str) -> NDArray[np.float64]:
        grid = np.full(self.grid, np.nan)
        grid[rows["layer"].to_numpy(), rows["kv_head"].to_numpy()] = rows[column].to_numpy()
        return grid

    def _combine(self, column: str, reduce: Any) -> NDArray[np.float64]:
        parts = [self.rows[self.rows["domain"] == domain] for domain in self.domains]
        tokens = np.stack([self._on_grid(part, "num_tokens") for part in parts])
        values = np.stack([self._on_grid(part, column) for part in parts])
        return np.asarray(reduce(values, tokens / tokens.sum(0)))


def _read_documents(path: Path, table: HeadScores) -> DocumentCounts | None:
    counts = DocumentCounts.read(path, table.domains, table.grid)
    if counts is not None:
        density = np.stack([table.domain_density(domain) for domain in table.domains])
        if not np.allclose(counts.density(), density, rtol=0, atol=1e-5):
            raise UserError(
                f"{path} does not add up to the densities of the table beside it\n"
                "probe again, or remove it: only intervals need it"
            )
    return counts


def _read_positions(path: Path, grid: Grid) -> pd.DataFrame | None:
    """The table in a file, None where there is none. Raises ``UserError`` for heads that the ``grid`` has not."""
    if not is_file(path):
        return None
    rows = read_table(path, "positions", _POSITION_COLUMNS)
    wrong = (rows["layer"] >= grid[0]) | (rows["kv_head"] >= grid[1]) | (rows["start"] >= rows["end"])
    if wrong.any():
        line = rows.index[int(wrong.to_numpy().argmax())]
        raise UserError(
            f"positions {path}, line {line}: expected a head of {grid_words(grid)}, and a start before the end\n"
            "probe again, or remove it: only a figure needs it"
        )
    return rows.reset_index(drop=True)
