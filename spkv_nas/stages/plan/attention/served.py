"""Compute the KV cache that a serving engine plans for full attention and for layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.units import parse_bytes
from spkv_nas.engines.cache import LayoutPlan
from spkv_nas.stages.engines import Served, chosen_engine
from spkv_nas.stages.plan.attention.options import AttentionOptions


@dataclass(frozen=True)
class ServedLayouts(Served):
    """Caches of full attention and of layouts in a serving engine.

    Attributes:
        layouts: (title, cache) of full attention and of each layout.
    """

    layouts: tuple[tuple[str, LayoutPlan], ...]


def plan_layouts(
    options: AttentionOptions, shape: Shape, titles: Sequence[str], layouts: Sequence[Layout], context: int
) -> ServedLayouts | None:
    """Plan the caches of full attention and of layouts in the engine that options name; None without one.

    Args:
        options: engine, its settings, dtype and memory.
        shape: sizes of the model.
        titles: title of full attention and of each layout.
        layouts: the layouts.
        context: maximum tokens of a request.

    Raises:
        UserError: the engine cannot run a layout.
    """
    serving = chosen_engine(options)
    if serving is None:
        return None
    # Full attention, whose window does not matter
    cache = serving.cache(
        shape.grid, head_dim=shape.head_dim, dtype=options.kv_dtype or "bfloat16", window=1, context=context
    )
    plans = [serving.engine.plan_layout(cache, [shape.num_kv_heads] * shape.num_layers)]
    # Each layout, with its window
    for title, layout in zip(titles[1:], layouts, strict=True):
        serving.engine.check_sinks(layout.sinks, f"leave out {title}, or use another engine")
        counts = layout.global_mask.sum(1).tolist()
        plans.append(serving.engine.plan_layout(replace(cache, window=layout.window, sinks=layout.sinks), counts))
    memory = None if options.kv_bytes is None else parse_bytes(options.kv_bytes)
    return ServedLayouts(serving.engine, cache, memory, tuple(zip(titles, plans, strict=True)))
