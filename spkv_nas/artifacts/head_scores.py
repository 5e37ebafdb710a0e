"""Table of head scores: by default the density, the share of keys that each KV head keeps, per domain.

SP-KV paper, "Measuring sparsity": density is the share of tokens whose utility is at least tau, not counting the
window, which is always kept. ``density.csv`` may be made by hand with only the columns layer, kv_head, density (or
score, for scores of another kind). ``probe.yaml`` names the signal and the kind and unit of its scores.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from spkv_nas.artifacts import diagnosis, grid, head_tables, local_layers, score_kind
from spkv_nas.artifacts.histogram import DocumentCounts, LogitHistogram
from spkv_nas.artifacts.kinds import DENSITY, SCORE
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.selection import (
    PATTERN,
    SELECTION,
    Selection,
    digest,
    read_selection,
    write_selection,
)
from spkv_nas.base import arguments, files, records, tables
from spkv_nas.base.errors import UserError
from spkv_nas.base.replace import replacing, settle

_TABLE = "density.csv"
RECORD = "probe.yaml"
_POSITIONS = "positions.csv"
_HISTOGRAM = "histogram.npz"
_DOCUMENTS = "documents.npz"
_GAINS = "gains.csv"
_WINDOWS = "windows.csv"


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores(grid.OnGrid):
    """Head scores per layer, KV head and domain, at one threshold.

    Where layers have different numbers of heads, ``values`` and ``standard_error`` [L, Hkv] are NaN beyond the heads of
    a layer, and ``density`` is 0.

    Example::

        scores = spkv_nas.probe(model, blocks, signal="head-gates", budget="25%")  # or HeadScores.from_array(values)
        scores.values, scores.grid  # float64 [L, Hkv], higher for heads that need global attention
        scores.write("probes/mine")

    Attributes:
        name: name of the probe, shared by ``probes/``, ``layouts/`` and ``reports/``.
        rows: columns ``head_tables.COLUMNS``; one row per (layer, head, domain), complete. ``num_tokens`` and
            ``num_documents`` are totals of the domain; ``standard_error`` is that of the score, clustered by document.
        tau: threshold of the densities.
        window: w of the gates; None if unknown (a table made by hand).
        positions: density by position in the block: layer, kv_head, start, end (tokens), density, num_tokens.
        positions_tau: threshold of ``positions``; None: ``tau``.
        histogram: histogram of the utility logits; None for a table made by hand.
        documents: counts per document at ``tau``; None for a table made by hand.
        record: where the table comes from, and what else was found (``probe.yaml``).
        probe_hash: ``content_hash`` of the table at the probe's threshold; None: this table is at it.
        gains: individual gain of each head, to validate the ranking; None if not measured.
        window_costs: cost of each window to each head, for layouts of several windows; None if not measured.
        selected_on: documents that the heads were scored on (``TokenBlocks.text_ids``); None if unknown.
    """

    name: str
    rows: pd.DataFrame
    tau: float = 0.5
    window: int | None = None
    positions: pd.DataFrame | None = None
    positions_tau: float | None = None
    histogram: LogitHistogram | None = None
    documents: DocumentCounts | None = None
    record: ProbeRecord = field(default_factory=ProbeRecord)
    probe_hash: str | None = None
    gains: head_tables.Gains | None = None
    window_costs: head_tables.WindowCosts | None = None
    selected_on: Selection | None = None

    @cached_property
    def heads_per_layer(self) -> tuple[int, ...]:
        """Return the number of KV heads of every layer."""
        return tuple(int(last) + 1 for last in self.rows.groupby("layer")["kv_head"].max())

    @property
    def signal(self) -> str:
        """Return the name of the signal, "density" or another one such as "duo-attention"."""
        return self.record.signal or (DENSITY if self.is_density else "custom")

    @property
    def sinks(self) -> int:
        """Return how many first tokens a local head saw besides its window while the scores were measured."""
        return self.record.sinks

    @cached_property
    def selection(self) -> str | None:
        """Return the digest of the documents that the heads were scored on; None if unknown."""
        if self.selected_on is not None:
            return digest(self.selected_on)
        return self.record.selection

    @cached_property
    def layers(self) -> list[int]:
        """Return the layers whose heads can be global: all but those that are local by design."""
        return local_layers.candidate_layers(local_layers.config_layers(self.native_windows))

    @property
    def num_candidates(self) -> int:
        """Return the number of KV heads that can be global."""
        return sum(self.heads_per_layer[layer] for layer in self.layers)

    @property
    def native_heads(self) -> tuple[int, ...]:
        """Return the window of every KV head that is local by design."""
        return tuple(self.cache_facts["native_heads"])

    @property
    def global_window(self) -> int:
        """Return how many recent keys a global head sees: all, unless every layer has a native window."""
        return int(self.cache_facts["global_window"])

    @cached_property
    def cache_facts(self) -> dict[str, Any]:
        """Return ``local_layers.cache_facts`` of the probe's model, with the size of heads if the probe records it."""
        layers = local_layers.config_layers(self.native_windows)
        sizes: Sequence[int | None]
        sizes = self.record.head_dims or [self.record.head_dim] * self.num_layers
        return local_layers.cache_facts(layers, self.heads_per_layer, sizes)

    @property
    def native_windows(self) -> list[int | None]:
        """Return the sliding window of every layer in the checkpoint, None for full attention."""
        return self.record.native_windows or [None] * self.num_layers

    @property
    def local_sinks(self) -> int | None:
        """Return ``sinks``; None for densities, whose gates decide about the first tokens."""
        return None if self.is_density else self.sinks

    @property
    def memory_budget(self) -> int | None:
        """Return the number of global heads that the memory leaves which the probe was measured for; None without."""
        return None if self.record.memory is None else self.record.budget

    @property
    def kind(self) -> str:
        """Return the kind of the scores, one of ``kinds.KINDS``."""
        return self.record.kind or DENSITY

    @property
    def is_density(self) -> bool:
        """Return whether the scores are densities, which depend on a threshold."""
        return self.kind == DENSITY

    @cached_property
    def measure(self) -> score_kind.Measure:
        """Return the name, unit and colour scale of the scores."""
        values = self.values[self.is_head]
        return score_kind.Measure.of(self.kind, self.signal, self.record.unit, values)

    @property
    def missed_price(self) -> str | None:
        """Return a warning if the gates missed the target density of their price; else None."""
        if not self.is_density:
            return None
        return diagnosis.missed_price(
            self.record.target_density,
            self.record.reached_density,
            weights_learned=self.record.training != diagnosis.FROZEN,
        )

    @property
    def tau_of_positions(self) -> float:
        """Return the threshold of ``positions``."""
        return self.tau if self.positions_tau is None else self.positions_tau

    @cached_property
    def content_hash(self) -> str:
        """Return 8 hexadecimal digits of this probe's content, the same in memory, in files and at every threshold."""
        if self.probe_hash is not None:
            return self.probe_hash
        rows = tables.csv_text(head_tables.file_rows(self.rows))
        key = hashlib.sha256(f"{self.tau} {self.window}\n{rows}".encode())
        if self.histogram is not None:
            key.update(self.histogram.counts.astype("<i8").tobytes())
        return key.hexdigest()[:8]

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """Return the names of the domains, sorted."""
        return tuple(sorted(self.rows["domain"].unique()))

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """Return the scores [L, Hkv], the mean over domains weighted by tokens; scores in nats may be negative."""
        return np.asarray(self._weighted("score").sum(0))

    @cached_property
    def density(self) -> NDArray[np.float64]:
        """Return ``values`` [L, Hkv] with negative scores clipped to 0, and 0 where a layer has no head."""
        return np.asarray(np.nan_to_num(self.values.clip(0.0)))

    @cached_property
    def standard_error(self) -> NDArray[np.float64]:
        """Return the standard errors [L, Hkv], clustered by document; NaN if unknown."""
        return np.asarray(np.sqrt((self._weighted("standard_error") ** 2).sum(0)))

    @property
    def mean(self) -> float:
        """Return rho, the mean density over all heads (paper, "Measuring sparsity")."""
        return float(self.density[self.is_head].mean())

    @property
    def std(self) -> float:
        """Return the standard deviation of density over heads."""
        return float(self.density[self.is_head].std())

    def domain_density(self, domain: str, *, signed: bool = False) -> NDArray[np.float64]:
        """Return one domain's scores [L, Hkv], clipped at 0 unless ``signed``. Raises ``UserError`` if unknown."""
        if domain not in self.domains:
            raise UserError(
                f"density table '{self.name}' has no domain '{domain}'; it has "
                f"{', '.join(self.domains)}"
            )
        values = np.asarray(self._by_domain("score")[self.domains.index(domain)])
        return values if signed else np.nan_to_num(values.clip(0.0))

    def with_record(self, **entries: object) -> "HeadScores":
        """Return the table with other entries in its record."""
        return replace(self, record=self.record.with_entries(**entries))

    def at_tau(self, tau: float) -> "HeadScores":
        """Return the table at another threshold, with standard errors NaN and ``positions`` as probed.

        Raises ``UserError`` if ``tau`` is outside [0, 1], or the table has no histogram.
        """
        if not 0.0 <= tau <= 1.0:
            raise UserError(f"tau must lie in [0, 1]; found {tau}")
        if tau == self.tau:
            return self
        histogram = self._need_histogram()
        # Recompute densities
        domain = self.rows["domain"].map(histogram.domains.index)
        scores = histogram.density(tau)[domain, self.rows["layer"], self.rows["kv_head"]]
        rows = self.rows.assign(score=scores, standard_error=np.nan)
        documents = None
        if self.documents is not None:
            order = [histogram.domains.index(domain) for domain in self.documents.domains]
            documents = self.documents.at_tau(tau, lambda tau: histogram.density(tau)[order])
        return replace(
            self,
            rows=rows,
            tau=tau,
            documents=documents,
            positions_tau=self.tau_of_positions,
            probe_hash=self.content_hash,
        )

    def tau_for_density(self, rho: float) -> float:
        """Return the threshold, keeping any tokens, of mean density closest to ``rho``; errors as ``at_tau``."""
        if not 0.0 <= rho <= 1.0:
            raise UserError(f"the density to match must lie in [0, 1]; found {rho}")
        histogram = self._need_histogram()
        tokens = self.rows.groupby("domain")["num_tokens"].first()
        shares = [float(tokens.get(domain, 0)) / tokens.sum() for domain in histogram.domains]
        return histogram.tau_for_density(rho, shares)

    def diagnosis(self) -> list[str]:
        """Return warnings if the gates missed their price or have not differentiated; empty for other signals."""
        if not self.is_density:
            return []
        missed = [] if self.missed_price is None else [self.missed_price]
        # With a price, density measures need, not the number of useful keys
        is_priced = bool(self.record.price) or self.record.target_density is not None
        return missed + diagnosis.undifferentiated(self.density[self.is_head], is_priced=is_priced)

    def _repr_html_(self) -> str:
        """Return an HTML table of the score of every KV head (densities in percent), for notebooks."""
        measure = self.measure
        texts = [
            [measure.scale.text(score) for score in scores[:num_heads]]
            for scores, num_heads in zip(self.values, self.heads_per_layer, strict=True)
        ]
        at_tau = f", at tau {self.tau:g}" if self.is_density else ""
        mean = f"mean {measure.scale.factor * self.mean:.1f}"
        caption = f"{self.name}: {measure.noun}, {measure.shown}{at_tau}; {mean}"
        return grid.grid_html(caption, measure.scale.fraction(self.values), texts)

    def __repr__(self) -> str:
        """Return name, signal, kind, grid and unit on one line."""
        facts = f"signal {self.signal}, kind {self.kind}, unit {self.measure.unit}"
        return f"HeadScores({self.name!r}, {grid.grid_words(self.heads_per_layer)}, {facts})"

    @classmethod
    def from_array(
        cls,
        values: ArrayLike,
        *,
        name: str = "custom",
        kind: str = SCORE,
        window: int | None = None,
        **entries: object,
    ) -> "HeadScores":
        """Create a table from scores [L, Hkv], higher for heads that need global attention; NaN where there is none.

        Args:
            values: finite numbers; densities and shares lie in [0, 1].
            name: name of the table.
            kind: "score", "share", "gain" or "density".
            window: recent keys that local heads of its layouts see.
            entries: entries of ``probe.yaml``, such as ``unit`` and ``sinks``.
        """
        window = arguments.convert("window", int | None, window)
        record = ProbeRecord.of({**entries, "name": name, "window": window})
        rows = head_tables.array_rows(values, kind)
        return cls(name, rows, window=window, record=record.with_entries(kind=kind))

    def to_frame(self) -> pd.DataFrame:
        """Return one row per layer, KV head and domain, as ``density.csv`` has them."""
        return head_tables.file_rows(self.rows, self.kind)

    @classmethod
    def read(cls, path: files.StrPath) -> "HeadScores":
        """Read ``density.csv``, given the file or its folder, and the probe's other files beside it.

        Raises:
            UserError: a file is damaged or does not belong to the table; names file and line.

        Warns:
            UserWarning: a table or ``probe.yaml`` was edited after it was written.
        """
        path = Path(path)
        # Read the record, which only belongs to a file of the standard name
        file = path / _TABLE if files.is_folder(path) else path
        folder = file.parent
        settle(folder)
        entries: dict[str, object] = {}
        if file.name == _TABLE and files.is_file(folder / RECORD):
            entries = records.read_record(folder / RECORD, "probe")
        record = ProbeRecord.of(entries, f"probe {folder / RECORD}")
        # Read the table
        rows, kind = head_tables.read_rows(file, record.kind, record.heads_per_layer)
        table = cls(
            name=record.name or (folder.resolve().name if file.name == _TABLE else file.stem),
            rows=rows,
            tau=record.tau,
            window=record.window,
            record=record if kind == DENSITY else record.with_entries(kind=kind),
        )
        if not entries:
            return table
        # Read the files beside it
        sizes = table.heads_per_layer
        domains = table.domains
        densities = [table.domain_density(domain) for domain in domains]
        selected_on = None
        if record.selection is not None:
            selected_on = read_selection(record.selection, [folder])
        return replace(
            table,
            positions=head_tables.read_positions(folder / _POSITIONS, sizes),
            histogram=LogitHistogram.read(folder / _HISTOGRAM, domains, table.grid),
            documents=DocumentCounts.read(folder / _DOCUMENTS, domains, densities),
            gains=head_tables.Gains.read(folder / _GAINS, sizes),
            window_costs=head_tables.WindowCosts.read(folder / _WINDOWS, sizes, domains),
            selected_on=selected_on,
        )

    def write(self, folder: files.StrPath) -> None:
        """Write ``density.csv``, ``probe.yaml`` and what else is known, in place of all files of an earlier probe."""
        facts = self._facts()
        # List the files of an earlier probe, which are replaced or removed
        earlier = [
            file.name for file in Path(folder).glob(PATTERN) if str(self.selection) not in file.name
        ]
        parts = {
            _HISTOGRAM: self.histogram,
            _DOCUMENTS: self.documents,
            _GAINS: self.gains,
            _WINDOWS: self.window_costs,
        }
        with replacing(Path(folder), stale=(_POSITIONS, *parts, *earlier)) as new:
            tables.write_csv(new / _TABLE, head_tables.file_rows(self.rows, self.kind))
            if self.positions is not None and self.tau_of_positions == self.tau:
                tables.write_csv(new / _POSITIONS, self.positions)
            for name, part in parts.items():
                if part is not None:
                    part.write(new / name)
            if self.selected_on is not None:
                facts[SELECTION] = write_selection(new, self.selected_on)
            records.write_record(new / RECORD, {**self.record.entries(), **facts})

    def _facts(self) -> dict[str, object]:
        """Return the entries of ``probe.yaml`` that follow from the table itself."""
        decimals = 4 if self.is_density else 6
        facts: dict[str, object] = {
            "name": self.name,
            "kind": self.kind,
            "unit": self.measure.unit,
            "tau": self.tau,
            "window": self.window,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
        }
        if not self.is_head.all():
            facts["heads_per_layer"] = list(self.heads_per_layer)
        facts[f"mean_{self.kind}"] = round(self.mean, decimals)
        facts[f"std_{self.kind}"] = round(self.std, decimals)
        return facts

    def _need_histogram(self) -> LogitHistogram:
        """Return the histogram, or raise ``UserError`` without one."""
        if self.histogram is not None:
            return self.histogram
        raise UserError(
            f"density table '{self.name}' has no histogram of utilities, so its density is known "
            f"only at tau = {self.tau:g}\n"
            "probe the model again to choose another tau"
        )

    def _by_domain(self, column: str) -> NDArray[np.float64]:
        """Return a column as an array [P, L, Hkv], in the order of ``domains``."""
        order = np.lexsort([self.rows[key] for key in ("kv_head", "layer", "domain")])
        values = self.rows[column].to_numpy(np.float64)[order].reshape(-1, self.num_heads)
        return head_tables.on_grid(values, self.heads_per_layer)

    @cached_property
    def domain_shares(self) -> NDArray[np.float64]:
        """Return the domains' shares of the tokens, [P], in the order of ``domains``."""
        tokens = self._by_domain("num_tokens")[:, 0, 0]
        return np.asarray(tokens / tokens.sum())

    def _weighted(self, column: str) -> NDArray[np.float64]:
        """Return a column times the domains' shares of the tokens, [P, L, Hkv]."""
        return np.asarray(self._by_domain(column) * self.domain_shares[:, None, None])
