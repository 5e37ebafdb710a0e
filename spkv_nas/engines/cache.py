"""Plan the KV cache of a serving engine: base class, the cache's sizes, and the plan.

An allocator works in pages and groups of layers, so memory is no linear function of the number of global heads: a
larger number can cost the same as a smaller one, or less.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spkv_nas.base import errors, units
from spkv_nas.engines.engine import Engine


@dataclass(frozen=True)
class ServedCache:
    """Sizes of the KV cache of a model that an engine serves."""

    grid: tuple[int, int]  # (L, Hkv)
    head_dim: int  # D, of keys and of values
    dtype: str  # of the cache, one of ``ITEM_BYTES``
    window: int  # visible recent keys of a local head
    context: int  # maximum tokens of a request
    page_size: int  # tokens per page
    in_flight: int  # maximum tokens of all requests in the steps that are scheduled at one time
    sinks: int = 0  # first tokens that a local head sees besides its window

    @property
    def num_heads(self) -> int:
        """Return L * Hkv."""
        return self.grid[0] * self.grid[1]

    @property
    def head_bytes(self) -> int:
        """Return the bytes of one token in one KV head, keys and values."""
        return 2 * self.head_dim * units.ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class CachePlan:
    """Cache that an engine plans for requests of maximum length, in pages of one size that all requests share."""

    page_bytes: int  # bytes of a page in all layers of a group
    request_pages: int  # pages of a request
    form: str = field(default="whole layers", compare=False)  # how the layout is served

    @property
    def request_bytes(self) -> int:
        """Return the bytes by which the cache grows with a request."""
        return self.page_bytes * self.request_pages

    def concurrency(self, memory: int) -> float:
        """Return the requests that fit in ``memory`` bytes, as vLLM reports them."""
        return memory // self.page_bytes / self.request_pages

    def tokens(self, cache: ServedCache, memory: int) -> int:
        """Return the tokens of the requests that fit in ``memory`` bytes."""
        return int(self.concurrency(memory) * cache.context)

    def memory(self, requests: int) -> int:
        """Return the bytes that requests need, with the page that vLLM keeps for padding."""
        return self.page_bytes * (requests * self.request_pages + 1)

    def cells(self, context: int, memory: int | None) -> tuple[str, ...]:
        """Format the bytes of a request and, if memory is limited, the requests and the tokens that fit."""
        size = units.format_bytes(self.request_bytes)
        if memory is None:
            return (size,)
        concurrency = self.concurrency(memory)
        return size, f"{concurrency:,.2f}", f"{int(concurrency * context):,}"


class PlannedEngine(Engine, ABC):
    """Serving engine that runs any layout, and whose memory is counted as its allocator does."""

    evidence: str  # how its plans were checked
    note: str  # what its plans assume
    page_size: int  # default tokens per page
    in_flight: int  # default tokens in flight
    max_sinks: int = 0  # most sink tokens that a local head may see
    max_windows: int = 3  # most windows of local heads; each has groups of pages of its own

    @abstractmethod
    def plan(self, cache: ServedCache, num_global: int) -> CachePlan:
        """Plan the cache of a model with ``num_global`` global KV heads, in whole layers."""

    @abstractmethod
    def plan_layout(self, cache: ServedCache, windows: Sequence[Sequence[int | None]]) -> CachePlan:
        """Plan the cache of a layout from the windows of its heads by layer (None: global), in the smallest form."""

    def check_sinks(self, sinks: int, advice: str) -> None:
        """Raise ``UserError``, with ``advice``, if local heads see more sink tokens than the engine keeps."""
        if sinks > self.max_sinks:
            limit = f"at most {self.max_sinks} sink token" if self.max_sinks else "no sink tokens"
            raise errors.UserError(f"{self.title} keeps {limit} for local heads, but the layout has {sinks}\n{advice}")

    def check_windows(self, num_windows: int, advice: str) -> None:
        """Raise ``UserError``, with ``advice``, if local heads have more windows than the engine serves."""
        if num_windows > self.max_windows:
            raise errors.UserError(
                f"{self.title} serves at most {self.max_windows} windows of local heads, each in pages of its own, but "
                f"the layout has {num_windows}\n{advice}"
            )


@dataclass(frozen=True)
class Serving:
    """Engine with its settings."""

    engine: PlannedEngine
    page_size: int  # tokens per page
    in_flight: int  # maximum tokens of all requests in the steps that are scheduled at one time
    kv_dtype: str | None = None  # data type of keys and values; None: the model's

    def cache(self, grid: tuple[int, int], **sizes: Any) -> ServedCache:
        """Return the sizes of a model's cache in this engine, from the other fields of ``ServedCache``."""
        return ServedCache(grid, page_size=self.page_size, in_flight=self.in_flight, **sizes)
