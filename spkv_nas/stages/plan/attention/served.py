"""Compute the KV cache that a serving engine plans for full attention and for layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError
from spkv_nas.base.units import ITEM_BYTES, parse_bytes
from spkv_nas.cost.engines.engine import Engine, LayoutPlan, ServedCache
from spkv_nas.stages.engines import chosen_engine
from spkv_nas.stages.plan.attention.options import AttentionOptions


@dataclass(frozen=True)
class ServedLayouts:
    """Caches of full attention and of layouts in a serving engine.

    Attributes:
        engine: the engine.
        cache: sizes of the cache of full attention.
        layouts: (title, cache) of full attention and of each layout.
        memory: bytes of the cache; None: not limited.
    """

    engine: Engine
    cache: ServedCache
    layouts: tuple[tuple[str, LayoutPlan], ...]
    memory: int | None


def plan_layouts(
    options: AttentionOptions, shape: Shape, titles: Sequence[str], layouts: Sequence[Layout], context: int
) -> ServedLayouts | None:
    """Plan the caches of full attention and of layouts in the engine that options name; None without one.

    Args:
        options: engine, its settings, bytes per number and memory.
        shape: sizes of the model.
        titles: title of full attention and of each layout.
        layouts: the layouts.
        context: maximum tokens of a request.

    Raises:
        UserError: the engine cannot run a layout, or there is no dtype of so many bytes.
    """
    serving = chosen_engine(options)
    if serving is None:
        return None
    dtypes = {size: name for name, size in reversed(ITEM_BYTES.items())}
    if options.element_size not in dtypes:
        sizes = ", ".join(map(str, sorted(dtypes)))
        raise UserError(f"--engine counts numbers of {sizes} bytes; found --element-size {options.element_size}")
    dtype = dtypes[options.element_size]
    # Full attention, whose window does not matter
    cache = serving.cache(shape.grid, head_dim=shape.head_dim, dtype=dtype, window=1, context=context)
    plans = [serving.engine.plan_layout(cache, [shape.num_kv_heads] * shape.num_layers)]
    # Each layout, with its window
    for title, layout in zip(titles[1:], layouts, strict=True):
        serving.engine.check_sinks(layout.sinks, f"leave out {title}, or use another engine")
        counts = layout.global_mask.sum(1).tolist()
        plans.append(serving.engine.plan_layout(replace(cache, window=layout.window, sinks=layout.sinks), counts))
    memory = None if options.kv_bytes is None else parse_bytes(options.kv_bytes)
    return ServedLayouts(serving.engine, cache, tuple(zip(titles, plans, strict=True)), memory)
