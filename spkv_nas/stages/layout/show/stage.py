"""Read layouts and compute their coverage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spkv_nas.artifacts.layout import Layout
from spkv_nas.proposal.coverage import coverage
from spkv_nas.stages.layout.reading import read_layout
from spkv_nas.stages.layout.show.options import ShowLayoutsOptions
from spkv_nas.stages.lookup import find_table


@dataclass(frozen=True)
class ShownLayout:
    """Layout file, with its coverage in [0, 1] if there is a density table to compute it from."""

    file: Path
    layout: Layout
    coverage: float | None


def show(options: ShowLayoutsOptions) -> list[ShownLayout]:
    """Read layout files, and compute their coverage if a probe is named."""
    table = None if options.probe is None else find_table(options.folders, options.probe)
    shown = []
    for file in options.files:
        proposal = read_layout(file)
        (layout,) = proposal.layouts.values()
        covered = None if table is None else coverage(proposal.table(table), layout)
        shown.append(ShownLayout(file, layout, covered))
    return shown
