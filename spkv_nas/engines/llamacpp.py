"""Describe llama.cpp, and plan a KV cache as its cells do (``src/llama-kv-cache-iswa.cpp``, 02c28f53; read, not run).

Every slot of the server (``-np N``, without ``--kv-unified``) has cells of its own: in a global layer as many as the
context, in a local layer those of the window and of a micro-batch, both padded to a multiple of 256.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spkv_nas.engines.cache import CachePlan, PlannedEngine, ServedCache
from spkv_nas.engines.engine import (
    EXACT,
    OTHER_LAYERS,
    PERIODS,
    PROGRAMS,
    REFUSED,
    SPKV_FORMS,
    Cell,
    Outcome,
    Program,
    tried_with,
)


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


class LlamaCpp(PlannedEngine):
    """llama.cpp; its cache is planned with a number of slots and no full-size cache of local layers (``--swa-full``).

    Its converter takes the architecture from ``lm_config``.
    """

    name = "llamacpp"
    title = "llama.cpp"
    run_in = "llama-cpp-python 0.3.36"
    outcomes = dict.fromkeys(
        ("ministral", "qwen2", "qwen3", f"gemma3_text{OTHER_LAYERS}", "smollm3", f"cohere2{OTHER_LAYERS}", "exaone4",
         *SPKV_FORMS), REFUSED,
    ) | {
        **dict.fromkeys(("gemma3_text", "olmo3"), EXACT),
        f"gpt_oss{OTHER_LAYERS}": Cell(Outcome.REFUSED, is_read=True),
        "granite_swa": Cell(Outcome.EXACT, "refused where head_dim is not hidden_size / num_attention_heads"),
    }  # fmt: skip
    tried: ClassVar = {
        "gemma3_text": tried_with(),
        "olmo3": tried_with(rope_theta=(10_000.0,)),
        "granite_swa": tried_with("attention_multiplier", "tie_word_embeddings"),
    }
    ignores_windows = ("qwen2", "qwen3", "smollm3", "exaone4", *(f"{kind}{OTHER_LAYERS}" for kind in PERIODS))
    guard_key = "lm_config"
    program = Program(PROGRAMS / "run_llamacpp.py", "llama_cpp", converts=True)
    evidence = "read in its source, not run"
    note = "whole layers only; one slot for each request (-np N, without --kv-unified)"
    per_head = False
    page_size = 256  # multiple to which cells are padded
    in_flight = 512  # n_ubatch

    def guard(self, reason: str) -> dict[str, list[str]]:
        """Return an architecture that the converter does not know."""
        return {"architectures": [reason]}

    def plan(self, cache: ServedCache, num_global: int) -> CachePlan:
        """Plan the cache of a model with ``num_global`` global KV heads in whole layers."""
        page = cache.page_size
        global_cells = -(-cache.context // page) * page
        local_cells = -(-min(global_cells, cache.window + cache.in_flight) // page) * page
        cells = num_global * global_cells + (cache.num_heads - num_global) * local_cells
        return SlotsPlan(cells * cache.head_bytes)


LLAMACPP = LlamaCpp()
