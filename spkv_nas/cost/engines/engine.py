"""Describe how a serving engine pays for a KV cache: base class, the cache's sizes, and budgets that cost no more.

An allocator works in pages, groups of layers and pools, so memory is no linear function of the number of global heads:
a larger number can cost the same as a smaller one, or less.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from spkv_nas.artifacts.grid import Grid
from spkv_nas.base.errors import UserError
from spkv_nas.base.units import ITEM_BYTES, format_bytes


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
    """

    grid: Grid
    head_dim: int
    dtype: str
    window: int
    context: int
    page_size: int
    in_flight: int

    @property
    def num_heads(self) -> int:
        """Return L * Hkv."""
        return self.grid[0] * self.grid[1]

    @property
    def head_bytes(self) -> int:
        """Return the bytes of one token in one KV head, keys and values."""
        return 2 * self.head_dim * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class PagedPlan:
    """Cache that an engine plans, in pages of one size that all requests share.

    Attributes:
        page_bytes: bytes of a page in all layers that share a page table.
        request_pages: pages of a request of maximum length.
    """

    page_bytes: int
    request_pages: int

    @property
    def request_bytes(self) -> int:
        """Return the bytes of a request of maximum length."""
        return self.page_bytes * self.request_pages

    def num_pages(self, memory: int) -> int:
        """Return the pages in a cache of ``memory`` bytes."""
        return memory // self.page_bytes

    def concurrency(self, memory: int) -> float:
        """Return the requests of maximum length that fit in ``memory`` bytes."""
        return self.num_pages(memory) / self.request_pages

    def tokens(self, cache: ServedCache, memory: int) -> int:
        """Return the tokens of requests of maximum length that fit in ``memory`` bytes."""
        return int(self.concurrency(memory) * cache.context)

    def memory(self, requests: int) -> int:
        """Return the bytes that requests of maximum length need, with the page that the engine keeps for padding."""
        return self.page_bytes * (requests * self.request_pages + 1)


class Engine(ABC):
    """Serving engine.

    Attributes:
        name: name on the command line.
        title: name and version in sentences.
        evidence: how its plans were checked.
        page_size: default tokens per page.
        in_flight: default tokens in flight.
    """

    name: str
    title: str
    evidence: str
    page_size: int
    in_flight: int

    @abstractmethod
    def plan(self, cache: ServedCache, num_global: int) -> PagedPlan:
        """Plan the cache of a model with ``num_global`` global KV heads."""


@dataclass(frozen=True)
class Step:
    """Budget that no larger one undercuts.

    Attributes:
        num_global: global KV heads.
        plan: cache at this budget.
        instead_of: smaller budgets that cost as much or more.
    """

    num_global: int
    plan: PagedPlan
    instead_of: tuple[int, ...]


def steps(engine: Engine, cache: ServedCache, *, stride: int = 1) -> Iterator[Step]:
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


def no_dearer(engine: Engine, cache: ServedCache, num_global: int) -> int:
    """Return the largest number of global heads whose requests take no more memory than those of ``num_global``."""
    limit = engine.plan(cache, num_global).request_bytes
    numbers = range(cache.num_heads, num_global, -1)
    return next((number for number in numbers if engine.plan(cache, number).request_bytes <= limit), num_global)


def largest_budget(engine: Engine, cache: ServedCache, memory: int, requests: int) -> int:
    """Return the largest number of global heads with which the requests fit in ``memory`` bytes.

    Raises:
        UserError: they do not fit with one global head or more.
    """
    for number in range(cache.num_heads, 0, -1):
        if engine.plan(cache, number).memory(requests) <= memory:
            return number
    least = min(engine.plan(cache, number).memory(requests) for number in range(1, cache.num_heads + 1))
    raise UserError(
        f"{format_bytes(memory)} is too small in {engine.title}: {requests} requests of {cache.context:,} tokens need "
        f"at least {format_bytes(least)}\nuse more memory, a shorter --context, a smaller --batch or another --kv-dtype"
    )
