"""Plan a KV cache as SGLang's two pools do (SGLang 0.5.23, ``model_executor/pool_configurator.py``; read, not run).

Global layers share one pool of tokens, local layers another, which has 0.8 as many tokens (``--swa-full-tokens-ratio``)
however many its layers are: a local layer saves a fifth of a global one. A request takes its tokens in the global pool;
in the local pool, its window, the tokens between two evictions, and two pages. Besides, the local pool holds the tokens
in flight, two prefill chunks. A model without local or without global layers has one pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spkv_nas.engines.cache import CachePlan, PlannedEngine, ServedCache
from spkv_nas.engines.engine import Cell, Outcome

_FIFTHS = 4  # tokens of the local pool, in fifths of the global pool's
_EVICTION = 128  # tokens between two evictions, SGLANG_SWA_EVICTION_INTERVAL


@dataclass(frozen=True)
class PoolsPlan(CachePlan):
    """Cache in a pool of global and a pool of local layers.

    Attributes:
        token_fifths: fifths of bytes of a token of the global pool, with its share of the local pool.
        local_fifths: tokens of the local pool, in fifths of the global pool's.
        page_size: tokens per page.
        global_tokens: tokens of a request in the global pool; 0 without one.
        local_tokens: tokens of a request in the local pool; 0 without one.
        shared_tokens: tokens of the local pool besides those of requests.
    """

    token_fifths: int
    local_fifths: int
    page_size: int
    global_tokens: int
    local_tokens: int
    shared_tokens: int

    @property
    def request_bytes(self) -> int:
        """Return the bytes of a request's tokens in the pool that limits it."""
        fifths = self.token_fifths
        return max(-(-self.global_tokens * fifths // 5), -(-self.local_tokens * fifths // self.local_fifths))

    def concurrency(self, memory: int) -> float:
        """Return the requests that fit in both pools of ``memory`` bytes."""
        pool = self._aligned(5 * memory // self.token_fifths)
        local = self._aligned(pool * self.local_fifths // 5) - self.shared_tokens
        limits = [pool / self.global_tokens] if self.global_tokens else []
        return min([*limits, max(0, local) / self.local_tokens] if self.local_tokens else limits)

    def memory(self, requests: int) -> int:
        """Return the bytes with which requests fit in both pools."""
        pool = requests * self.global_tokens
        if self.local_tokens:
            local = self._aligned(requests * self.local_tokens + self.shared_tokens + self.page_size - 1)
            pool = max(pool, self._aligned(-(-5 * local // self.local_fifths) + self.page_size - 1))
        return -(-pool * self.token_fifths // 5)

    def _aligned(self, tokens: int) -> int:
        """Return the tokens of whole pages."""
        return tokens // self.page_size * self.page_size


class Sglang(PlannedEngine):
    """SGLang; its cache is planned with hybrid pools, one tensor-parallel rank and no speculative decoding."""

    name = "sglang"
    title = "SGLang 0.5.23"
    outcomes: ClassVar = {
        "ministral": Cell(Outcome.DIFFERENT, "one key more than the window", is_read=True),
        **dict.fromkeys(("qwen2", "qwen3"), Cell(Outcome.DENSE, is_read=True)),
    }
    evidence = "read in its source, not run"
    note = "whole layers only; local layers have 0.8 as many tokens as global ones (SGLang's --swa-full-tokens-ratio)"
    per_head = False
    page_size = 1
    in_flight = 16384  # two prefill chunks of 8,192

    def plan(self, cache: ServedCache, num_global: int) -> CachePlan:
        """Plan the cache of a model with ``num_global`` global KV heads in whole layers."""
        page, num_local = cache.page_size, cache.num_heads - num_global
        local_fifths = _FIFTHS if num_global else 5
        return PoolsPlan(
            cache.head_bytes * (5 * num_global + local_fifths * num_local),
            local_fifths,
            page,
            global_tokens=-(-cache.context // page) * page if num_global else 0,
            local_tokens=cache.window + _EVICTION + 2 * page if num_local else 0,
            shared_tokens=cache.in_flight + page if num_local else 0,
        )


SGLANG = Sglang()
