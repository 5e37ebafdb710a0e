"""Declare the options of the ``layout convert`` command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.stages import flags

Source = Annotated[
    Path,
    Flag(
        "Layout (.yaml), DuoAttention folder, DuoAttention or PruLong file (.tsv), or head scores (.csv).",
        argument=True,
    ),
]
Target = Annotated[
    Path,
    Flag("Output: .yaml writes a layout, .tsv a PruLong mask, a folder DuoAttention's two files.", argument=True),
]
Sparsity = Annotated[
    float | None, Flag("Make heads below this quantile of the scores local, as DuoAttention and PruLong do.")
]
Threshold = Annotated[float | None, Flag("Make heads with at least this score global.")]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of the ``layout convert`` command."""

    source: Source
    target: Target
    budget: flags.OptionalBudget = default(note="Takes the heads with the highest scores.")
    sparsity: Sparsity = None
    threshold: Threshold = None
    window: flags.OptionalWindow = default(None, "the source's")
    sinks: flags.OptionalSinks = default(None, "the source's")
