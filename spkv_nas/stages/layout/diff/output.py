"""Print what ``layout diff`` returns, and its JSON document."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from spkv_nas.base.console import out
from spkv_nas.stages.layout.diff.options import DiffOptions
from spkv_nas.stages.layout.diff.stage import ComparedLayouts
from spkv_nas.stages.layout.grids import describe, heads_document, print_grid


def show(options: DiffOptions, compared: ComparedLayouts) -> None:
    """Print how two layouts differ."""
    first, second, delta = compared.first, compared.second, compared.difference
    if compared.is_same:
        out.print(f"the same layout: {describe(first)}", soft_wrap=True)
        return
    out.print(Text(f"- {options.a}: {describe(first)}\n+ {options.b}: {describe(second)}"), soft_wrap=True)
    out.print(f"{delta.num_heads} heads differ, Jaccard index of the global heads {delta.jaccard:.3f}")
    if delta.num_heads:
        out.print("G: global in both; .: local in both; -: global only in the first; +: global only in the second")
        print_grid(delta.marks, ["" for _ in delta.marks])


def document(compared: ComparedLayouts) -> dict[str, Any]:
    """Return how two layouts differ."""
    return {
        "same": compared.is_same,
        "layouts": [heads_document(compared.first), heads_document(compared.second)],
        "num_heads": compared.difference.num_heads,
        "jaccard": compared.difference.jaccard,
        "marks": compared.difference.marks,
    }
