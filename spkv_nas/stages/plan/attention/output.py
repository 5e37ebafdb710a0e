"""Print what attention costs, and convert it to a JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, say
from spkv_nas.base.units import format_microseconds

if TYPE_CHECKING:
    from spkv_nas.stages.plan.attention.served import ServedLayouts
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
            "-" if row.total_flops is None else f"{row.total_flops / 1e9:,.4g}",
            format_microseconds(row.decode_seconds),
            format_microseconds(row.prefill_seconds),
        )
    out.print(grid)
    # Where the times come from
    if result.times is None:
        say("\n".join(["times: not measured", *result.remedy]))
    else:
        out.print(f"times: attention of all layers, {escape(result.times.source)}")
    if result.costs[0].total_flops is None:
        out.print("total: unknown for a mixture of experts, of which a token uses only some parameters")
    if result.times is not None and result.costs[0].prefill_seconds is None:
        out.print(f"-: prefill was not measured at {result.context:,} tokens")
    if result.served is not None:
        _served(result.served)


def _served(result: ServedLayouts) -> None:
    """Print the memory that a serving engine plans for full attention and for layouts."""
    title = f"KV cache in {result.engine.title}: requests of {result.cache.context:,} tokens"
    grid = Table("attention", "served as", *result.titles, title=title)
    for name, layout in result.layouts:
        grid.add_row(escape(name), layout.form, *result.cells(layout.plan))
    out.print(grid)
    say(f"{result.in_flight}; {result.engine.title}: {result.engine.evidence}")


def document(result: AttentionCosts) -> dict[str, Any]:
    """Return KV bytes, FLOPs and times of full attention, of the layouts and of a density."""
    served = result.served
    engine: dict[str, Any] = {}
    if served is not None:
        rows = [{"name": name, "form": layout.form, **served.sizes(layout.plan)} for name, layout in served.layouts]
        engine = served.document("layouts", rows)
    return {
        "name": result.name,
        "shape": result.shape,
        "context": result.context,
        "costs": result.costs,
        "times": None if result.times is None else result.times.source,
        **engine,
    }
