"""Attention times measured on one machine by ``spkv-nas calibrate``, and the time of a layout derived from them.

The measurement covers one layer of one shape: its time per decoded token with g = 0 .. Hkv global heads, at a few
context lengths (``spkv_nas.cost.timing``). The time of a layout is the sum over its layers, each at its own g. Between
measured points, times are interpolated linearly in g and the context length. There is no extrapolation beyond the
measured contexts, because the slope changes once a cache exceeds the processor's caches or a GPU is fully used.

A folder holds ``calibration.csv`` (context, num_global, seconds_per_token) and ``calibration.yaml``, which records what
was measured, the hardware and the versions. Reading needs no torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from pydantic import Field

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base import arrays, errors, limits, replace, schema, tables
from spkv_nas.base.records import read_record, write_record
from spkv_nas.cost.formulas import visible_keys

COLUMNS = (
    tables.Column("context", "whole", low=1),
    tables.Column("num_global", "whole"),
    tables.Column("seconds_per_token", "number", high=limits.MAX_SHOWN),
)
_MAX_COUNTS = 5  # maximum numbers of global heads to measure
_FIRST_CONTEXT = 1024


@dataclass(frozen=True)
class LayerCase:
    """One attention layer to measure."""

    num_heads: int  # query heads Hq, a multiple of ``num_kv_heads``
    num_kv_heads: int  # KV heads Hkv
    head_dim: int  # channels of a head D
    dtype: str  # "float32", "bfloat16" or "float16"
    window: int  # visible recent keys of a local head
    batch: int  # number of sequences
    device: str  # "cpu" or "cuda"

    @property
    def global_counts(self) -> tuple[int, ...]:
        """Return the numbers of global heads to measure: from 0 to Hkv, at most five, evenly spaced."""
        number = min(_MAX_COUNTS, self.num_kv_heads + 1)
        counts = np.linspace(0, self.num_kv_heads, number)
        return tuple(sorted({round(count) for count in counts}))


class Timing(NamedTuple):
    """One measured time per decoded token of a layer: tokens in the cache, number of global KV heads, and seconds."""

    context: int
    num_global: int
    seconds_per_token: float


@dataclass(frozen=True)
class Calibration:
    """Attention times measured on one machine (see the module docstring)."""

    case: LayerCase
    hardware: str  # product name of the processor or GPU
    num_threads: int  # CPU threads
    timings: tuple[Timing, ...]  # a full grid of contexts and numbers of global heads
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)  # versions and commit

    def __post_init__(self) -> None:
        """Validate the grid of times. Raises ``UserError`` unless it is full and has 0 and Hkv global heads."""
        _ = self.grid

    @property
    def source(self) -> str:
        """Return a description such as "measured on AMD EPYC 9B45, 2 threads, float32, batch 1"."""
        threads = f"{self.num_threads} thread" + ("s" if self.num_threads > 1 else "")
        where = f"{self.hardware}, {threads}" if self.case.device == "cpu" else self.hardware
        return f"measured on {where}, {self.case.dtype}, batch {self.case.batch}"

    @property
    def contexts(self) -> tuple[int, ...]:
        """Return the measured context lengths, ascending."""
        return tuple(int(context) for context in self.grid[0])

    def check_shape(self, shape: Shape) -> None:
        """Raise ``UserError`` unless a model has the measured heads; its number of layers may differ."""
        measured = heads_title(self.case)
        present = heads_title(shape)
        if present != measured:
            raise errors.UserError(
                f"the calibration was measured for {measured}; this model has {present}"
            )

    def check_window(self, window: int) -> None:
        """Raise ``UserError`` unless local heads were measured with this window."""
        if window != self.case.window:
            raise errors.UserError(
                f"the calibration was measured for window {self.case.window}, not {window}"
            )

    def check_context(self, context: int) -> None:
        """Raise ``UserError`` unless a context length is within the measured range."""
        first = self.contexts[0]
        last = self.contexts[-1]
        if not first <= context <= last:
            raise errors.UserError(
                f"the calibration measured {first:,} to {last:,} tokens, not {context:,}: "
                f"calibrate with --context {context}"
            )

    def layer_seconds(self, context: int, *, density: float = 1.0, window: int = 0) -> float:
        """Return the seconds of attention in one layer per decoded token, with ``context`` tokens in the cache.

        ``density`` is the share of the KV heads that are global, the others seeing ``window`` tokens; a head that keeps
        a share of its keys counts as that share of a global head. Raises ``UserError`` for what was not measured.
        """
        if not 0.0 <= density <= 1.0:
            raise errors.UserError(f"density must lie in [0, 1]; found {density:g}")
        if density < 1.0:
            self.check_window(window)
        self.check_context(context)
        contexts, counts, seconds = self.grid
        at_contexts = [np.interp(density * self.case.num_kv_heads, counts, row) for row in seconds]
        return float(np.interp(context, contexts, at_contexts))

    def layout_seconds(
        self, heads: Layout | Sequence[float], context: int, *, window: int = 0, sinks: int = 0
    ) -> float:
        """Return the seconds of attention in all layers per decoded token: the sum of ``layer_seconds``.

        ``heads`` is a layout, which has its window and sinks, or by layer the share of the KV heads that are global.
        Raises ``UserError`` as ``layer_seconds``, and for a layout with another number of KV heads per layer.
        """
        # Read shares, window and sinks from a layout
        if isinstance(heads, Layout):
            if heads.num_kv_heads != self.case.num_kv_heads:
                raise errors.UserError(
                    f"layout '{heads.strategy}' has {heads.num_kv_heads} KV heads per layer, "
                    f"the times were measured for {self.case.num_kv_heads}"
                )
            window = heads.window
            sinks = heads.sinks
            heads = [row.count("G") / self.case.num_kv_heads for row in heads.heads]
        # Add up the layers, those of one share at once
        total = 0.0
        for share, number in Counter(heads).items():
            density = _with_sinks(share, context, window=window, sinks=sinks)
            total += number * self.layer_seconds(context, density=density, window=window)
        return total

    @cached_property
    def grid(self) -> tuple[arrays.Float, arrays.Float, arrays.Float]:
        """Return contexts [C] and numbers of global heads [N], both ascending, and seconds per token [C, N]."""
        rows = pd.DataFrame(self.timings, columns=Timing._fields)
        points = rows.groupby(["context", "num_global"])["seconds_per_token"]
        grid = points.first().unstack()
        # Check that it is complete
        if grid.isna().any(axis=None) or len(self.timings) != grid.size:
            raise errors.UserError("expected one time for every context and number of global heads")
        counts = [int(count) for count in grid.columns]
        if not {0, self.case.num_kv_heads} <= {*counts} or max(counts) > self.case.num_kv_heads:
            raise errors.UserError(
                f"expected times of 0 to {self.case.num_kv_heads} global heads; found {counts}"
            )
        return grid.index.to_numpy(float), np.array(counts, dtype=float), grid.to_numpy(float)

    def write(self, folder: Path) -> None:
        """Write ``calibration.csv`` and ``calibration.yaml``, replacing an earlier calibration."""
        machine = {
            "hardware": self.hardware,
            "num_threads": self.num_threads,
            "environment": dict(self.environment),
        }
        rows = pd.DataFrame(self.timings, columns=Timing._fields)
        with replace.replacing(folder) as new:
            tables.write_csv(new / "calibration.csv", rows)
            write_record(new / "calibration.yaml", {**vars(self.case), **machine})

    @classmethod
    def read(cls, folder: Path) -> "Calibration":
        """Read a calibration that ``write`` wrote. Raises ``UserError`` if a file is missing or damaged."""
        replace.settle(folder)
        where = f"calibration {folder / 'calibration.yaml'}"
        record = schema.validate(
            _CalibrationFile, read_record(folder / "calibration.yaml", "calibration"), where
        )
        case = LayerCase(**record.model_dump(include=set(LayerCase.__dataclass_fields__)))
        try:
            rows = tables.read_table(folder / "calibration.csv", "calibration", COLUMNS)
            timings = tuple(Timing(*row) for row in rows.itertuples(index=False, name=None))
            return cls(case, record.hardware, record.num_threads, timings, record.environment)
        except errors.UserError as error:
            raise errors.UserError(f"{where}: {error}") from error


class _CalibrationFile(schema.Recorded):
    """Schema of ``calibration.yaml``."""

    num_heads: int = Field(ge=1, le=limits.MAX_WINDOW)
    num_kv_heads: int = Field(ge=1, le=limits.MAX_WINDOW)
    head_dim: int = Field(ge=1, le=limits.MAX_WINDOW)
    dtype: str
    window: int = Field(ge=1, le=limits.MAX_WINDOW)
    batch: int = Field(ge=1, le=limits.MAX_WINDOW)
    device: str
    hardware: str
    num_threads: int = Field(ge=1)
    environment: dict[str, str]


def default_contexts(largest: int) -> tuple[int, ...]:
    """Return the context lengths to measure: 1k, 4k, 16k, ... below ``largest``, and ``largest``."""
    steps = (_FIRST_CONTEXT * 4**exponent for exponent in range(largest.bit_length()))
    return (*(step for step in steps if step < largest), largest)


def _with_sinks(share: float, context: int, *, window: int, sinks: int) -> float:
    """Return the share of global heads that reads as many keys as ``share`` of them and the sink tokens of the others.

    Times are measured for windows alone (``calibrate``), and depend on the number of keys.
    """
    keys = visible_keys(context, density=share, window=window + sinks)
    local = min(window, context)
    return (keys - local) / (context - local) if sinks and context > local else share


def heads_title(heads: LayerCase | Shape) -> str:
    """Describe the heads of a layer."""
    return f"{heads.num_heads} query heads, {heads.num_kv_heads} KV heads of size {heads.head_dim}"
