"""Print layouts as grids of marks, for the ``layout`` commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.console import out

_STYLES = {"G": "bold green", "L": "dim", ".": "dim", "+": "bold green", "-": "bold red"}


def describe(layout: Layout) -> str:
    """Return a layout's shape, share of global heads, window, sink tokens and hash in one line."""
    share = f"{layout.num_global} of {layout.num_heads} global ({100 * layout.num_global / layout.num_heads:.1f} %)"
    size = f"{layout.num_layers} layers x {layout.num_kv_heads} KV heads"
    return f"{size}, {share}, {layout.reach}, hash {layout.hash}"


def print_grid(rows: Sequence[str], notes: Sequence[str]) -> None:
    """Print one line per layer: its index, its marks, a note."""
    for layer, (row, note) in enumerate(zip(rows, notes, strict=True)):
        marks = [(mark, _STYLES[mark]) for mark in row]
        out.print(Text.assemble(f"{layer:>4}  ", *marks, f"  {note}".rstrip()), soft_wrap=True)


def heads_document(layout: Layout) -> dict[str, Any]:
    """Return a layout's heads, counts and provenance."""
    return {
        "heads": layout.heads,
        "num_global": layout.num_global,
        "num_heads": layout.num_heads,
        "window": layout.window,
        "sinks": layout.sinks,
        "strategy": layout.strategy,
        "hash": layout.hash,
    }
