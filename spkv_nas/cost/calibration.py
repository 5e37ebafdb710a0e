"""Attention times measured on one machine by ``spkv-nas calibrate``, and the time of a layout derived from them.

The measurement covers one layer of one shape: its time per token with g = 0 .. Hkv global heads, at a few context
lengths, for decoding and prefill (``spkv_nas.cost.timing``). The time of a layout is the sum over its layers, each at
its own g. Between measured points, times are interpolated linearly in g and the context length. There is no
extrapolation beyond the measured contexts, because the slope changes once a cache exceeds the processor's caches or a
GPU reaches full utilisation.

A folder holds ``calibration.csv`` (phase, context, num_global, seconds_per_token) and ``calibration.yaml``, which
records what was measured, the hardware and the versions. It also holds the table's SHA-256, so that files of two
calibrations cannot be mixed up. Reading needs no torch.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field

from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError, shortened
from spkv_nas.base.files import read_text, write_atomic
from spkv_nas.base.limits import MAX_SHOWN, MAX_WINDOW
from spkv_nas.base.records import read_record, write_record
from spkv_nas.base.replace import replacing
from spkv_nas.base.schema import Section, validate
from spkv_nas.base.tables import Column, csv_text, read_table
from spkv_nas.cost.times import AttentionTimes, Phase

FORMAT = "spkv-nas/calibration/1"
COLUMNS = (
    Column("phase", choices=get_args(Phase)),
    Column("context", "whole", low=1),
    Column("num_global", "whole"),
    Column("seconds_per_token", "number", high=MAX_SHOWN),
)
DTYPES = ("float32", "bfloat16", "float16")
_MAX_COUNTS = 5  # maximum numbers of global heads to measure
_FIRST_CONTEXT = 1024

Float = NDArray[np.float64]


@dataclass(frozen=True)
class LayerCase:
    """One attention layer to measure.

    Attributes:
        num_heads: query heads Hq, a multiple of ``num_kv_heads``.
        num_kv_heads: KV heads Hkv.
        head_dim: channels of a head D.
        dtype: one of ``DTYPES``.
        window: visible recent keys of a local head.
        batch: number of sequences.
        device: "cpu" or "cuda".
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int
    batch: int
    device: str

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UserError: a number is below 1, Hq is not a multiple of Hkv, or the dtype is unknown.
        """
        for name in ("num_heads", "num_kv_heads", "head_dim", "window", "batch"):
            if not 1 <= getattr(self, name) <= MAX_WINDOW:
                value = shortened(str(getattr(self, name)), 40)
                raise UserError(f"{name} must be at least 1 and at most {MAX_WINDOW}; found {value}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads")
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype '{self.dtype}' is unknown; expected one of {', '.join(DTYPES)}")

    @property
    def title(self) -> str:
        """Return a description of the heads."""
        return _title(self)

    @property
    def global_counts(self) -> tuple[int, ...]:
        """Return the numbers of global heads to measure: from 0 to Hkv, at most five, evenly spaced."""
        number = min(_MAX_COUNTS, self.num_kv_heads + 1)
        return tuple(sorted({round(g) for g in np.linspace(0, self.num_kv_heads, number)}))


@dataclass(frozen=True)
class Timing:
    """One measured time.

    Attributes:
        phase: "decode" or "prefill".
        context: tokens in the cache or sequence.
        num_global: global KV heads of the layer; the others are local.
        seconds_per_token: time of the layer.
    """

    phase: Phase
    context: int
    num_global: int
    seconds_per_token: float


@dataclass(frozen=True)
class Calibration(AttentionTimes):
    """Attention times measured on one machine (see the module docstring).

    Attributes:
        case: the measured layer.
        hardware: product name of the processor or GPU.
        num_threads: CPU threads.
        timings: by phase, a full grid of contexts and numbers of global heads.
        environment: versions and commit.
    """

    case: LayerCase
    hardware: str
    num_threads: int
    timings: tuple[Timing, ...]
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Validate the grid of times.

        Raises:
            UserError: a point is missing or repeated, or 0 or Hkv global heads were not measured.
        """
        for phase in get_args(Phase):
            points = [(row.context, row.num_global) for row in self.timings if row.phase == phase]
            contexts, counts = ({point[axis] for point in points} for axis in (0, 1))
            full = {(context, count) for context in contexts for count in counts}
            if len(points) != len(full) or set(points) != full:
                raise UserError(f"{phase}: expected one time for every context and number of global heads")
            if not {0, self.num_kv_heads} <= counts or max(counts) > self.num_kv_heads:
                raise UserError(
                    f"{phase}: expected times of 0 to {self.num_kv_heads} global heads; found {sorted(counts)}"
                )

    @property
    def num_kv_heads(self) -> int:
        """Return Hkv."""
        return self.case.num_kv_heads

    @property
    def source(self) -> str:
        """Return a description such as "measured on AMD EPYC 9B45, 2 threads, float32, batch 1"."""
        threads = f"{self.num_threads} thread" + ("s" if self.num_threads > 1 else "")
        where = f"{self.hardware}, {threads}" if self.case.device == "cpu" else self.hardware
        return f"measured on {where}, {self.case.dtype}, batch {self.case.batch}"

    def contexts(self, phase: Phase) -> tuple[int, ...]:
        """Return the measured context lengths, ascending."""
        return tuple(int(context) for context in self.grid(phase)[0])

    def covers(self, context: int, phase: Phase) -> bool:
        """Return whether ``context`` is within the measured range."""
        measured = self.contexts(phase)
        return measured[0] <= context <= measured[-1]

    @property
    def is_disturbed(self) -> bool:
        """Return whether a longer context was decoded over 10 % faster, so other work disturbed the timing."""
        _, _, seconds = self.grid("decode")
        return bool((seconds[1:] < 0.9 * seconds[:-1]).any())

    def check_shape(self, shape: Shape) -> None:
        """Check that a model has the measured heads; its number of layers may differ.

        Raises:
            UserError: the heads differ.
        """
        if _title(shape) != self.case.title:
            raise UserError(f"the calibration was measured for {self.case.title}; this model has {_title(shape)}")

    def check_window(self, window: int) -> None:
        """Check that local heads were measured with this window.

        Raises:
            UserError: the window differs.
        """
        if window != self.case.window:
            raise UserError(
                f"the calibration was measured for window {self.case.window}, not {window}: calibrate with "
                f"--window {window}"
            )

    def check_context(self, context: int, phase: Phase) -> None:
        """Check that a context length is within the measured range.

        Raises:
            UserError: it is outside.
        """
        if not self.covers(context, phase):
            measured = self.contexts(phase)
            raise UserError(
                f"the calibration measured {phase} at {measured[0]:,} to {measured[-1]:,} tokens, "
                f"not at {context:,}: calibrate with --context {context}"
            )

    def layer_seconds(self, context: int, *, density: float = 1.0, window: int = 0, phase: Phase = "decode") -> float:
        """Return the seconds per token of one layer, as ``AttentionTimes.layer_seconds``.

        The time is interpolated linearly in the number of global heads, density * Hkv, and in the context length.

        Raises:
            UserError: the density is outside [0, 1], or the window or context was not measured.
        """
        if not 0.0 <= density <= 1.0:
            raise UserError(f"density must lie in [0, 1]; found {density:g}")
        if density < 1.0:
            self.check_window(window)
        self.check_context(context, phase)
        contexts, counts, seconds = self.grid(phase)
        at_contexts = [np.interp(density * self.num_kv_heads, counts, row) for row in seconds]
        return float(np.interp(context, contexts, at_contexts))

    def grid(self, phase: Phase) -> tuple[Float, Float, Float]:
        """Return contexts [C] and numbers of global heads [N], both ascending, and seconds per token [C, N]."""
        return self._grids[phase]

    @cached_property
    def _grids(self) -> dict[Phase, tuple[Float, Float, Float]]:
        """Return ``grid`` for every phase."""
        grids: dict[Phase, tuple[Float, Float, Float]] = {}
        for phase in get_args(Phase):
            seconds_by_point = {
                (row.context, row.num_global): row.seconds_per_token for row in self.timings if row.phase == phase
            }
            contexts, counts = (sorted({point[axis] for point in seconds_by_point}) for axis in (0, 1))
            seconds = np.array([[seconds_by_point[context, count] for count in counts] for context in contexts])
            grids[phase] = np.array(contexts, dtype=float), np.array(counts, dtype=float), seconds
        return grids

    def write(self, folder: Path) -> None:
        """Write ``calibration.csv`` and ``calibration.yaml``, replacing an earlier calibration."""
        rows = [astuple(timing) for timing in self.timings]
        table = csv_text(pd.DataFrame(rows, columns=[column.name for column in COLUMNS]))
        content = {
            "format": FORMAT,
            **asdict(self.case),
            "hardware": self.hardware,
            "num_threads": self.num_threads,
            "environment": dict(self.environment),
            "csv_sha256": _sha256(table),
        }
        with replacing(folder) as new:
            write_atomic(new / "calibration.csv", table)
            write_record(new / "calibration.yaml", content)

    @classmethod
    def read(cls, folder: Path) -> Calibration:
        """Read a calibration that ``write`` wrote.

        Raises:
            UserError: a file is missing or damaged, has another format, or does not belong to the other.

        Warns:
            UserWarning: ``calibration.yaml`` was changed after it was written.
        """
        file = folder / "calibration.yaml"
        where = f"calibration {file}"
        # Read and validate the record
        with warnings.catch_warnings(record=True) as cautions:  # warn only if the table is accepted
            warnings.simplefilter("always")
            data = read_record(file, "calibration")
        if data.get("format") != FORMAT:
            found_format = shortened(repr(data.get("format")), 40)
            raise UserError(f"{where}: expected 'format: {FORMAT}'; found {found_format}")
        header = validate(_CalibrationFile, data, where)
        # Check that the table belongs to the record
        table = folder / "calibration.csv"
        if _sha256(read_text(table, "calibration")) != header.csv_sha256:
            raise UserError(f"{where} does not match calibration.csv in its folder: calibrate again")
        # Read the table
        try:
            case = LayerCase(**header.model_dump(include=set(LayerCase.__dataclass_fields__)))
            rows = read_table(table, "table", COLUMNS)
            timings = tuple(Timing(*row) for row in rows.itertuples(index=False, name=None))
            calibration = cls(case, header.hardware, header.num_threads, timings, header.environment)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        for caution in cautions:
            warnings.warn(caution.message, stacklevel=2)
        return calibration


class _CalibrationFile(Section):
    """Schema of ``calibration.yaml``."""

    format: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int
    batch: int
    device: str
    hardware: str
    num_threads: int = Field(ge=1)
    environment: dict[str, str]
    csv_sha256: str


def default_contexts(largest: int) -> tuple[int, ...]:
    """Return the context lengths to measure: 1k, 4k, 16k, ... below ``largest``, and ``largest``."""
    contexts = [largest]
    step = _FIRST_CONTEXT
    while step < largest:
        contexts.append(step)
        step *= 4
    return tuple(sorted(contexts))


def _title(heads: LayerCase | Shape) -> str:
    """Describe the heads of a layer."""
    return f"{heads.num_heads} query heads, {heads.num_kv_heads} KV heads of size {heads.head_dim}"


def _sha256(text: str) -> str:
    """Return the hexadecimal SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
