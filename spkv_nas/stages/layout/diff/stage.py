"""Compare two layouts of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from spkv_nas.artifacts.layout import Difference, Layout
from spkv_nas.base.console import out
from spkv_nas.stages.layout.grids import describe, heads_document, print_grid, read_layout


@dataclass(frozen=True)
class ComparedLayouts:
    """Two layouts and the difference of their heads."""

    first: Layout
    second: Layout
    difference: Difference

    @property
    def is_same(self) -> bool:
        """Return whether both layouts give the same model."""
        return self.first.hash == self.second.hash


def diff(files: Sequence[Path]) -> ComparedLayouts:
    """Compare two layouts of one model head by head."""
    (first,), (second,) = (read_layout(file).layouts.values() for file in files)
    return ComparedLayouts(first, second, Difference.of(first, second))


def show(files: Sequence[Path], compared: ComparedLayouts) -> None:
    """Print how the layouts of two files differ."""
    first, second, delta = compared.first, compared.second, compared.difference
    if compared.is_same:
        out.print(f"the same layout: {describe(first)}", soft_wrap=True)
        return
    out.print(Text(f"- {files[0]}: {describe(first)}\n+ {files[1]}: {describe(second)}"), soft_wrap=True)
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
