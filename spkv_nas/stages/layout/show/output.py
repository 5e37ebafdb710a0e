"""Print what ``layout show`` returns, and its JSON document."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from spkv_nas.base.console import out
from spkv_nas.stages.layout.grids import describe, heads_document, print_grid
from spkv_nas.stages.layout.show.stage import ShownLayout


def show(shown: list[ShownLayout]) -> None:
    """Print layouts as grids, with the number of global heads of every layer."""
    for entry in shown:
        _show_layout(entry)


def _show_layout(entry: ShownLayout) -> None:
    """Print a layout's summary and its grid."""
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
