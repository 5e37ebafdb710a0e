"""Declare the ``layout convert`` command: its options, their check, and its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.base.progress import Reporter
from spkv_nas.stages import flags
from spkv_nas.stages.result import Result

Source = Annotated[
    Path,
    Flag(
        "Layout (.yaml), DuoAttention folder, PruLong or DuoAttention file (.tsv), density table (.csv).", argument=True
    ),
]
Target = Annotated[
    Path,
    Flag("New file: .yaml is a layout, .tsv a PruLong mask; a folder gets DuoAttention's two files.", argument=True),
]
Sparsity = Annotated[
    float | None, Flag("Local: heads below this quantile of the scores, as DuoAttention and PruLong do.")
]
Threshold = Annotated[float | None, Flag("Global: heads with at least this score.")]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of the ``layout convert`` command."""

    source: Source
    target: Target
    budget: flags.OptionalBudget = default(note="Those of highest score.")
    sparsity: Sparsity = None
    threshold: Threshold = None
    window: flags.OptionalWindow = default(None, "the source's")


def convert(options: ConvertOptions, reporter: Reporter) -> Result:
    """Change a layout's form: ours, DuoAttention's, PruLong's. Says what a form cannot hold.

    A file of scores becomes a layout by --budget, --sparsity or --threshold; one of zeros and ones is a layout.
    """
    from spkv_nas.stages.layout.convert import output, stage

    return Result(stage.convert(options), output.show, lambda lines: {"file": options.target, "notes": lines})
