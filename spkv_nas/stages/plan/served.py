"""Compute the KV cache that a serving engine plans at every budget of whole layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spkv_nas.base.units import parse_bytes
from spkv_nas.stages.engines import Served, check_no_sliding_layers, chosen_engine

if TYPE_CHECKING:
    from spkv_nas.artifacts.shape import ModelSize
    from spkv_nas.engines.cache import Step
    from spkv_nas.stages.plan.options import PlanOptions


@dataclass(frozen=True)
class ServedBudgets(Served):
    """Budgets of a model in a serving engine.

    Attributes:
        steps: budgets in whole layers that no larger one undercuts, ascending; the last is full attention.
    """

    steps: tuple[Step, ...]


def plan_served(options: PlanOptions, size: ModelSize, *, window: int, context: int) -> ServedBudgets | None:
    """Plan the cache of a model at every budget in the engine that options name; None without one.

    Raises:
        UserError: layers of the model have a sliding window by design.
    """
    from spkv_nas.engines.cache import steps

    serving = chosen_engine(options)
    if serving is None:
        return None
    heads = size.heads
    check_no_sliding_layers(size.num_sliding)
    dtype = options.kv_dtype or "bfloat16"
    cache = serving.cache(heads.grid, head_dim=heads.head_dim, dtype=dtype, window=window, context=context)
    memory = None if options.kv_bytes is None else parse_bytes(options.kv_bytes)
    return ServedBudgets(serving.engine, cache, memory, tuple(steps(serving.engine, cache, stride=heads.num_kv_heads)))
