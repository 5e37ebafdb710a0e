"""Read layout files, and print layouts as grids of marks, for the ``layout`` commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.base.console import out
from spkv_nas.base.errors import UserError
from spkv_nas.stages.commands import command_line, next_line
from spkv_nas.stages.layout.convert.command import ConvertOptions

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


def _free(file: Path) -> Path:
    """Return the path, or if it exists one with ``-layout`` appended to its stem."""
    return file if not file.exists() else file.with_name(f"{file.stem}-layout{file.suffix}")


def read_layout(file: Path) -> Proposal:
    """Read one layout file. Raises ``UserError``, for a file of scores with the command that converts it."""
    if file.suffix in (".tsv", ".csv") or file.is_dir():
        stem = file.name if file.is_dir() else file.stem  # folder names may contain dots
        command = command_line(ConvertOptions(source=file, target=_free(file.with_name(f"{stem}.yaml")), budget="25%"))
        raise UserError(f"{file} is not a layout file; convert it first\n{next_line(command)}")
    return Proposal.read([file])
