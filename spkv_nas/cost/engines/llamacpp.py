"""Plan a KV cache as llama.cpp's cells do (``src/llama-kv-cache-iswa.cpp``, 02c28f53; read, not run).

Every slot of the server (``-np N``, without ``--kv-unified``) has cells of its own: in a global layer as many as the
context, in a local layer those of the window and of a micro-batch, both padded to a multiple of 256.
"""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.cost.engines.engine import CachePlan, Engine, ServedCache


@dataclass(frozen=True)
class SlotsPlan(CachePlan):
    """Cache in slots, one for each request.

    Attributes:
        slot_bytes: bytes of a slot.
    """

    slot_bytes: int

    @property
    def request_bytes(self) -> int:
        """Return the bytes of a slot."""
        return self.slot_bytes

    def concurrency(self, memory: int) -> float:
        """Return the slots that fit in ``memory`` bytes."""
        return float(memory // self.slot_bytes)

    def memory(self, requests: int) -> int:
        """Return the bytes of a slot for each request."""
        return requests * self.slot_bytes


class LlamaCpp(Engine):
    """llama.cpp's server with a number of slots and no full-size cache of local layers (``--swa-full``)."""

    name = "llamacpp"
    title = "llama.cpp"
    evidence = "read in its source, not run"
    note = "whole layers only; one slot for each request (-np N, without --kv-unified)"
    per_head = False
    page_size = 256  # multiple to which cells are padded
    in_flight = 512  # n_ubatch

    def plan(self, cache: ServedCache, num_global: int) -> CachePlan:
        """Plan the cache of a model with ``num_global`` global KV heads in whole layers."""
        page = cache.page_size
        global_cells = -(-cache.context // page) * page
        local_cells = -(-min(global_cells, cache.window + cache.in_flight) // page) * page
        cells = num_global * global_cells + (cache.num_heads - num_global) * local_cells
        return SlotsPlan(cells * cache.head_bytes)


LLAMACPP = LlamaCpp()
