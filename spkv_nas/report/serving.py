"""Show the KV cache that a serving engine's allocator plans for the page's budgets and layouts.

Everything is computed when the page is written; the page's script only looks it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.units import format_bytes
from spkv_nas.cost.cache_cost import EngineCost
from spkv_nas.engines.cache import CachePlan
from spkv_nas.report.chart import Row, Section
from spkv_nas.report.formatting import capitalized


@dataclass(frozen=True)
class EngineMemory:
    """KV cache in a serving engine, for requests of maximum length."""

    cost: EngineCost  # the engine, its settings, and the sizes of a request
    memory: int | None = None  # bytes of the cache; None: not limited

    @property
    def title(self) -> str:
        """Return the engine's name and version."""
        return self.cost.serving.engine.title

    @property
    def limited(self) -> tuple[str, ...]:
        """Return the titles of the columns about ``memory``, if it is limited."""
        return () if self.memory is None else (f"Requests in {format_bytes(self.memory)}", "Tokens")

    def cells(self, plan: CachePlan) -> tuple[str, ...]:
        """Return the bytes of a request and, if memory is limited, the requests and the tokens that fit."""
        return plan.cells(self.cost.context, self.memory)

    def phrase(self, plan: CachePlan, num_heads: int) -> str:
        """Return the same as a phrase, beside full attention in ``num_heads`` KV heads."""
        size, *limited = self.cells(plan)
        full = format_bytes(self.full_attention(num_heads).request_bytes)
        fitting = f"; {limited[0]} requests in {format_bytes(self.memory)}" if self.memory is not None else ""
        return f"{size} of {full} a request{fitting}"

    def full_attention(self, num_heads: int) -> CachePlan:
        """Return the cache of full attention in ``num_heads`` KV heads."""
        return self.cost.serving.engine.plan(self.cost.cache(num_heads), num_heads)


def budgets_in_engine(served: EngineMemory, table: HeadScores) -> dict[str, Any]:
    """Return what the explorer shows for each number of global heads.

    Returns:
        ``context``; ``bytes`` of a request by number of global heads, from 0; and ``texts``, which also say which
        larger number takes no more.
    """
    # Plan a request at every budget
    num_heads, engine = table.num_heads, served.cost.serving.engine
    cache = served.cost.cache(num_heads)
    plans = [engine.plan(cache, number) for number in range(num_heads + 1)]
    sizes = [plan.request_bytes for plan in plans]
    # Say which larger number of global heads takes no more
    texts = []
    for number, plan in enumerate(plans):
        larger = max(more for more in range(number, num_heads + 1) if sizes[more] <= sizes[number])
        note = f"; {larger} global heads take no more" if larger > number else ""
        texts.append(f"{served.phrase(plan, num_heads)}{note}")
    return {"context": served.cost.context, "bytes": sizes, "texts": texts}


def layout_in_engine(served: EngineMemory, layout: Layout) -> str:
    """Return what the explorer shows for a layout."""
    planned = served.cost.layout_plan(layout)
    if planned is None:
        return f"{served.title} runs {served.cost.serving.engine.sink_limit}"
    return f"{served.phrase(planned, layout.num_heads)}; as {planned.form}"


def serving_section(served: EngineMemory, table: HeadScores, layouts: Mapping[str, Layout]) -> Section:
    """Return the section on the memory of layouts, in the form that takes least; dashes where none is run."""
    cost, engine = served.cost, served.cost.serving.engine
    # List full attention, then the layouts
    full = served.cells(served.full_attention(table.num_heads))
    rows = [Row("full attention", (str(table.num_heads), "whole layers", *full))]
    for name, layout in layouts.items():
        planned = cost.layout_plan(layout)
        if planned is None:
            cells: tuple[str, ...] = (f"not run: {engine.sink_limit}", *("-" for _ in full))
        else:
            cells = (planned.form, *served.cells(planned))
        rows.append(Row(name, (str(layout.num_global), *cells)))
    return Section(
        "serving",
        f"KV cache in {engine.title}",
        f"Planned as the allocator of {engine.title} does ({engine.evidence}), for requests of {cost.context:,} tokens "
        f"with keys and values in {cost.dtype}, pages of {cost.serving.page_size} tokens and "
        f"{cost.serving.in_flight:,} tokens in flight. {capitalized(engine.note)}.",
        ("Layout", "Global heads", "Served as", "One request", *served.limited),
        (tuple(rows),),
    )
