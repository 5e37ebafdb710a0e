"""Print what attention costs, and convert it to a JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out
from spkv_nas.base.units import format_microseconds

if TYPE_CHECKING:
    from spkv_nas.stages.plan.attention.stage import AttentionCosts


def costs(result: AttentionCosts) -> None:
    """Print KV bytes, FLOPs and times of full attention, of layouts and of a density."""
    shape = result.shape
    out.print(
        f"[bold]{escape(result.name)}[/bold]: {shape.num_parameters / 1e6:,.4g} M parameters without embeddings, "
        f"{shape.num_layers} layers x {shape.num_kv_heads} KV heads of size {shape.head_dim}; "
        f"{result.context:,} tokens"
    )
    # Table of costs
    grid = Table(
        "attention",
        "KV bytes\nper token",
        "KV cache\nMiB",
        "attention\nGFLOPs",
        "total\nGFLOPs",
        "decode\nµs",
        "prefill\nµs",
        title="FLOPs and times are per token",
    )
    for row in result.costs:
        grid.add_row(
            escape(row.name),
            f"{row.kv_bytes_per_token:,.0f}",
            f"{row.kv_cache_bytes / 2**20:,.2f}",
            f"{row.attention_flops / 1e9:,.4g}",
            f"{row.total_flops / 1e9:,.4g}",
            format_microseconds(row.decode_seconds),
            format_microseconds(row.prefill_seconds),
        )
    out.print(grid)
    # Where the times come from
    out.print(f"times: attention of all layers, {escape(result.times.source)}")
    if result.costs[0].prefill_seconds is None:
        out.print(f"-: prefill was not measured at {result.context:,} tokens")


def document(result: AttentionCosts) -> dict[str, Any]:
    """Return KV bytes, FLOPs and times of full attention, of the layouts and of a density."""
    return {
        "name": result.name,
        "shape": result.shape,
        "context": result.context,
        "costs": result.costs,
        "times": result.times.source,
    }
