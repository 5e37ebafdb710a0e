"""Declare the options of the ``layout`` commands; the docstring of each class is the help of its command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.stages import flags, options


@dataclass(frozen=True, kw_only=True)
class ShowLayoutsOptions(options.InWorkspace):
    """Print layouts as grids of global (G) and local (L) heads, with each layer's number of global heads."""

    command = "layout show"

    files: flags.LayoutFiles
    probe: flags.OptionalProbe = default(note="Used to compute coverage.")


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Compare two layouts of one model by heads that differ, Jaccard index of the global heads, window and sink tokens.

    The exit code is 0 if both give the same model, 1 if they differ, and 2 if they cannot be compared. Strategy and
    provenance are ignored.
    """

    command = "layout diff"

    a: flags.LayoutFile
    b: flags.LayoutFile


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Convert a layout between the formats of spkv-nas, DuoAttention and PruLong.

    Prints what the target format cannot store. A file of scores becomes a layout by --budget, --sparsity or
    --threshold; a file of zeros and ones already is a layout.
    """

    command = "layout convert"

    source: Annotated[
        Path,
        Flag(
            "Layout (.yaml), DuoAttention folder, "
            "DuoAttention or PruLong file (.tsv), or head scores (.csv).",
            argument=True,
        ),
    ]
    target: Annotated[
        Path,
        Flag(
            "Output: .yaml writes a layout, .tsv a PruLong mask, "
            "a folder DuoAttention's two files.",
            argument=True,
        ),
    ]
    budget: flags.OptionalBudget = default(note="Takes the heads with the highest scores.")
    sparsity: Annotated[
        float | None,
        Flag("Make heads below this quantile of the scores local, as DuoAttention and PruLong do."),
    ] = None
    threshold: Annotated[float | None, Flag("Make heads with at least this score global.")] = None
    window: flags.OptionalWindow = default(None, "the source's")
    sinks: flags.OptionalSinks = default(None, "the source's")
