"""Read the serving engine whose memory the page counts from the options of ``report``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.units import parse_bytes, parse_context
from spkv_nas.cost.engines.cost import EngineCost
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.report.serving import EngineMemory
from spkv_nas.stages.engines import chosen_engine
from spkv_nas.stages.report.options import ReportOptions


def engine_memory(
    options: ReportOptions, table: HeadScores, probes: Sequence[HeadScores]
) -> dict[str, EngineMemory | None]:
    """Return the KV cache in the engine that options name, by probe of the page; empty without an engine.

    A probe whose local heads see sink tokens has None, because engines keep none.

    Args:
        options: engine, its settings, context, dtype, head dimension and memory.
        table: the page's probe.
        probes: all probes of the page.

    Raises:
        UserError: the engine does not count the cache of the page's model, or a number is unknown.
    """
    serving = chosen_engine(options)
    if serving is None:
        return {}
    requirements = Requirements(
        Constraints() if serving.engine.per_head else Constraints(granularity="layer"),
        context=None if options.context is None else parse_context(options.context),
        head_dim=options.head_dim,
        kv_dtype=options.kv_dtype,
        serving=serving,
    )
    cost = requirements.cache_cost(table, None)
    assert isinstance(cost, EngineCost)
    memory = None if options.kv_bytes is None else parse_bytes(options.kv_bytes)
    counted = {
        probe.name: EngineMemory(replace(cost, window=probe.window or cost.window, sinks=probe.sinks), memory)
        if probe.sinks <= serving.engine.max_sinks
        else None
        for probe in probes
    }
    return {**counted, table.name: EngineMemory(cost, memory)}
