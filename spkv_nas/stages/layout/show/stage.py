"""Read layouts and compute their coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.console import out
from spkv_nas.base.workspace import Workspace
from spkv_nas.proposal.coverage import coverage
from spkv_nas.stages.layout.grids import describe, heads_document, print_grid, read_layout
from spkv_nas.stages.lookup import find_table


@dataclass(frozen=True)
class ShownLayout:
    """Layout file, with its coverage in [0, 1] if there is a density table to compute it from."""

    file: Path
    layout: Layout
    coverage: float | None


def read_layouts(files: Sequence[Path], probe: str | None, workspace: Workspace) -> list[ShownLayout]:
    """Read layout files, and compute their coverage if a probe is named."""
    table = None if probe is None else find_table(workspace, probe)
    shown = []
    for file in files:
        proposal = read_layout(file)
        (layout,) = proposal.layouts.values()
        covered = None if table is None else coverage(proposal.table(table), layout)
        shown.append(ShownLayout(file, layout, covered))
    return shown


def show(shown: list[ShownLayout]) -> None:
    """Print layouts as grids, with the number of global heads of every layer."""
    for entry in shown:
        coverage = "" if entry.coverage is None else f", coverage {100 * entry.coverage:.2f} %"
        out.print(Text(f"{entry.file}: {describe(entry.layout)}{coverage}"), soft_wrap=True)
        print_grid(entry.layout.heads, [str(row.count("G")) for row in entry.layout.heads])


def document(shown: list[ShownLayout]) -> dict[str, Any]:
    """Return the layouts' heads and coverage."""
    return {
        "layouts": [
            {"file": entry.file, **heads_document(entry.layout), "coverage": entry.coverage} for entry in shown
        ],
    }
