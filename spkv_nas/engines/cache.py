"""Plan the KV cache of a serving engine: base class, the cache's sizes, and budgets that cost no more.

An allocator works in pages, groups of layers and pools, so memory is no linear function of the number of global heads:
a larger number can cost the same as a smaller one, or less.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spkv_nas.base.errors import UserError
from spkv_nas.base.units import ITEM_BYTES
from spkv_nas.engines.engine import Engine


@dataclass(frozen=True)
class ServedCache:
    """Sizes of the KV cache of a model that an engine serves.

    Attributes:
        grid: (L, Hkv).
        head_dim: D, of keys and of values.
        dtype: of the cache, one of ``ITEM_BYTES``.
        window: visible recent keys of a local head.
        context: maximum tokens of a request.
        page_size: tokens per page.
        in_flight: maximum tokens of all requests in the steps that are scheduled at one time.
        sinks: first tokens that a local head sees besides its window.
    """

    grid: tuple[int, int]
    head_dim: int
    dtype: str
    window: int
    context: int
    page_size: int
    in_flight: int
    sinks: int = 0

    @property
    def num_heads(self) -> int:
        """Return L * Hkv."""
        return self.grid[0] * self.grid[1]

    @property
    def head_bytes(self) -> int:
        """Return the bytes of one token in one KV head, keys and values."""
        return 2 * self.head_dim * ITEM_BYTES[self.dtype]


class CachePlan(ABC):
    """Cache that an engine plans for requests of maximum length."""

    @property
    @abstractmethod
    def request_bytes(self) -> int:
        """Return the bytes by which the cache grows with a request."""

    @abstractmethod
    def concurrency(self, memory: int) -> float:
        """Return the requests that fit in ``memory`` bytes."""

    @abstractmethod
    def memory(self, requests: int) -> int:
        """Return the bytes that requests need, with what the engine needs besides."""

    def tokens(self, cache: ServedCache, memory: int) -> int:
        """Return the tokens of the requests that fit in ``memory`` bytes."""
        return int(self.concurrency(memory) * cache.context)


@dataclass(frozen=True)
class LayoutPlan:
    """Cache that an engine plans for a layout.

    Attributes:
        form: how the layout is served, such as "whole layers".
        plan: the cache.
    """

    form: str
    plan: CachePlan


def is_mixed(cache: ServedCache, layer_counts: Sequence[int]) -> bool:
    """Return whether a layer has global and local heads."""
    return any(0 < count < cache.grid[1] for count in layer_counts)


class PlannedEngine(Engine, ABC):
    """Serving engine whose memory is counted as its allocator does.

    Attributes:
        evidence: how its plans were checked.
        note: which layouts it runs, and what its plans assume.
        per_head: whether it runs layouts that are not of whole layers.
        page_size: default tokens per page.
        in_flight: default tokens in flight.
        max_sinks: most sink tokens that a local head may see.
    """

    evidence: str
    note: str
    per_head: bool
    page_size: int
    in_flight: int
    max_sinks: int = 0

    @abstractmethod
    def plan(self, cache: ServedCache, num_global: int) -> CachePlan:
        """Plan the cache of a model with ``num_global`` global KV heads."""

    def plan_layout(self, cache: ServedCache, layer_counts: Sequence[int]) -> LayoutPlan:
        """Plan the cache of a layout, served in the form that takes the least memory.

        Args:
            cache: sizes of the cache.
            layer_counts: number of global heads in each layer.

        Raises:
            UserError: the engine runs whole layers only, and the layout has others.
        """
        if is_mixed(cache, layer_counts) and not self.per_head:
            raise UserError(
                f"{self.title} runs whole layers only, but the layout mixes global and local heads in a layer\n"
                "leave it out, or use an engine that runs layouts per head"
            )
        return LayoutPlan("whole layers", self.plan(cache, sum(layer_counts)))

    @property
    def sink_limit(self) -> str:
        """Return how many sink tokens local heads may see, as the end of a sentence."""
        return f"at most {self.max_sinks} sink token" if self.max_sinks else "no sink tokens"

    def check_sinks(self, sinks: int, advice: str) -> None:
        """Raise ``UserError``, with ``advice``, if local heads see more sink tokens than the engine keeps."""
        if sinks > self.max_sinks:
            raise UserError(
                f"{self.title} keeps {self.sink_limit} for local heads, but the layout has {sinks}\n{advice}"
            )


@dataclass(frozen=True)
class Serving:
    """Engine with its settings.

    Attributes:
        engine: the engine.
        page_size: tokens per page.
        in_flight: maximum tokens of all requests in the steps that are scheduled at one time.
    """

    engine: PlannedEngine
    page_size: int
    in_flight: int

    def cache(self, grid: tuple[int, int], **sizes: Any) -> ServedCache:
        """Return the sizes of a model's cache in this engine, from the other fields of ``ServedCache``."""
        return ServedCache(grid, page_size=self.page_size, in_flight=self.in_flight, **sizes)


@dataclass(frozen=True)
class Step:
    """Budget that no larger one undercuts.

    Attributes:
        num_global: global KV heads.
        plan: cache at this budget.
        instead_of: smaller budgets that cost as much or more.
    """

    num_global: int
    plan: CachePlan
    instead_of: tuple[int, ...]


def steps(engine: PlannedEngine, cache: ServedCache, *, stride: int = 1) -> Iterator[Step]:
    """Yield the budgets that no larger budget undercuts, ascending.

    Args:
        engine: the serving engine.
        cache: the cache.
        stride: heads by which budgets grow, such as Hkv for whole layers.
    """
    plans = {number: engine.plan(cache, number) for number in range(stride, cache.num_heads + 1, stride)}
    skipped: list[int] = []
    for number, plan in plans.items():
        if any(larger.request_bytes <= plan.request_bytes for more, larger in plans.items() if more > number):
            skipped.append(number)
            continue
        yield Step(number, plan, tuple(skipped))
        skipped = []
