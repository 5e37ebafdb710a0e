"""Declare the options of the ``layout convert`` command, and run it; its docstring is the help."""

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


def convert(options: ConvertOptions, reporter: Reporter) -> Result:
    """Convert a layout between the formats of spkv-nas, DuoAttention and PruLong.

    Prints what the target format cannot store. A file of scores becomes a layout by --budget, --sparsity or
    --threshold; a file of zeros and ones already is a layout.
    """
    from spkv_nas.base.console import say
    from spkv_nas.proposal.convert import convert as convert_file

    lines = convert_file(
        options.source,
        options.target,
        budget=options.budget,
        sparsity=options.sparsity,
        threshold=options.threshold,
        window=options.window,
        sinks=options.sinks,
    )
    return Result(lines, lambda lines: say("\n".join(lines)), lambda lines: {"file": options.target, "notes": lines})
