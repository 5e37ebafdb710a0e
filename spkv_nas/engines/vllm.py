"""Describe vLLM, and plan a KV cache as its allocator does (vLLM 0.32, ``v1/core/kv_cache_utils.py``).

An ``Attention`` of vLLM has one window, so a layer with global and local heads is served as several: by kind
(``kind_parts``: one for its global, one for its local heads), or as units of g heads each (``unit_parts``), where g
divides the number of global heads in every layer. What each keeps is written into pages of tokens, and:

- All pages get the size of the largest. An ``Attention`` with fewer heads has longer pages where the largest is a
  multiple of its own, and padded ones otherwise.
- Those of equal heads and window form a bucket, and every bucket is split into groups of equal size: as many as the
  smallest bucket has, or as the largest has if that is less than 1.5 times as many. Groups that are not full are
  padded. All members of a group share a page table.
- A request reserves, in every global group, the pages of its maximum length; in every local group, those of the window
  and of the tokens in flight, and one more, because a window may begin inside a page.
- With a sink token every local ``Attention`` has a cache of the first token beside it, with a bucket of its own
  (``serving/vllm/sink_tokens.py``). A request has a page in each of their groups.

Units of any g, and whole layers, give the same memory for the same total of global heads. The rules are those of cache
layouts whose outermost dimension is the layer, vLLM's default.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import ClassVar

from spkv_nas.engines import engine
from spkv_nas.engines.cache import CachePlan, PlannedEngine, ServedCache
from spkv_nas.engines.engine import EXACT, OTHER_LAYERS, REFUSED, SPKV_FORMS, Cell, Outcome, Program, tried_with

_FEW_PADDING = 1.5  # the largest bucket sets the size of groups below this multiple of the smallest


@dataclass(frozen=True)
class Part:
    """KV heads of a layer that one ``Attention`` serves: their number, and whether they see a window."""

    num_heads: int
    is_local: bool


def unit_parts(cache: ServedCache, num_global: int, size: int = 1) -> Counter[Part]:
    """Count the parts of a model that is split into units of ``size`` heads, which divides both numbers of heads."""
    counts = {False: num_global // size, True: (cache.num_heads - num_global) // size}
    return Counter({Part(size, is_local): count for is_local, count in counts.items() if count})


def kind_parts(cache: ServedCache, layer_counts: Sequence[int]) -> Counter[Part]:
    """Count the parts of a model whose layers are split by kind, from the number of global heads in each layer."""
    num_kv_heads = cache.grid[1]
    parts = [Part(count, is_local=False) for count in layer_counts if count]
    return Counter(
        parts + [Part(num_kv_heads - count, is_local=True) for count in layer_counts if count < num_kv_heads]
    )


def plan_parts(cache: ServedCache, parts: Mapping[Part, int]) -> CachePlan:
    """Plan the cache of a model with these numbers of parts."""
    # Bring all pages to one size
    most_heads = max(part.num_heads for part in parts)
    page_sizes = {
        part: cache.page_size * (1 if most_heads % part.num_heads else most_heads // part.num_heads) for part in parts
    }
    # Split buckets into groups of one size
    group_size, largest = min(parts.values()), max(parts.values())
    if largest < group_size * _FEW_PADDING:
        group_size = largest
    # Count the pages of a request of maximum length
    local_tokens = min(cache.window - 1 + cache.in_flight, cache.context)
    sink_pages = 1 if cache.sinks else 0
    request_pages = sum(
        -(-count // group_size)
        * (
            -(-local_tokens // page_sizes[part]) + 1 + sink_pages
            if part.is_local
            else -(-cache.context // page_sizes[part])
        )
        for part, count in parts.items()
    )
    return CachePlan(group_size * cache.page_size * most_heads * cache.head_bytes, request_pages)


class Vllm(PlannedEngine):
    """vLLM; its cache is planned with the hybrid KV cache manager, one pipeline stage and one tensor-parallel rank."""

    name = "vllm"
    title = "vLLM 0.32"
    outcomes: ClassVar = {
        **dict.fromkeys(
            ("ministral", "gemma3_text", f"gemma3_text{OTHER_LAYERS}", "olmo3", "smollm3", "exaone4", "granite_swa"),
            EXACT,
        ),
        **dict.fromkeys(("qwen2", "qwen3"), Cell(Outcome.EXACT, "with --model-impl transformers; refused without")),
        **dict.fromkeys(
            ("cohere2", f"cohere2{OTHER_LAYERS}"),
            Cell(Outcome.DIFFERENT, "one key more than the window; exact with --model-impl transformers"),
        ),
        **dict.fromkeys(SPKV_FORMS[:2], Cell(Outcome.EXACT, "with spkv-nas in its environment; refused otherwise")),
        **dict.fromkeys(SPKV_FORMS[2:], REFUSED),
    }
    tried: ClassVar = {
        "ministral": tried_with(
            "rope_theta", "tie_word_embeddings", "partial_rotary_factor", "attention_factor", rope_type=engine.SCALED,
            hidden_act=("gelu",),
        ),
        "qwen2": tried_with("rope_theta", "tie_word_embeddings", "attention_factor", rope_type=("yarn",)),
        "qwen3": tried_with("rope_theta", "tie_word_embeddings", "attention_factor", rope_type=engine.SCALED),
        "gemma3_text": tried_with(
            *engine.BASES, "query_pre_attn_scalar", "tie_word_embeddings", "final_logit_softcapping", "attention_bias",
            rope_type=engine.SCALED, sliding_rope_type=("linear",), hidden_activation=("gelu",),
        ),
        "olmo3": tried_with(*engine.BASES, rope_type=("yarn",), sliding_rope_type=("yarn",)),
        "smollm3": tried_with(
            "rope_theta", "tie_word_embeddings", "attention_bias", "no_rope_layers", rope_type=("llama3", "yarn")
        ),
        "exaone4": tried_with(rope_type=("llama3",)),
        "granite_swa": tried_with(
            *engine.MULTIPLIERS, "rope_theta", "layer_rope_theta", "tie_word_embeddings", "attention_bias", "mlp_bias",
            rope_type=engine.SCALED,
        ),
        # Plug-in: by the model type of the weights
        "spkv llama": tried_with("rope_theta", "tie_word_embeddings", "attention_factor", rope_type=engine.SCALED),
        "spkv mistral": tried_with("rope_theta", "tie_word_embeddings"),
        "spkv ministral": tried_with(),
        "spkv phi3": tried_with("rope_theta", "tie_word_embeddings"),
        "spkv qwen2": tried_with("rope_theta", "tie_word_embeddings", "attention_factor", rope_type=("yarn",)),
        "spkv qwen3": tried_with(
            "rope_theta", "tie_word_embeddings", "attention_factor", rope_type=("llama3", "yarn")
        ),
        "spkv gemma3_text": tried_with(
            *engine.BASES, "query_pre_attn_scalar", "tie_word_embeddings", rope_type=("linear", "llama3")
        ),
        "spkv granite": tried_with(*engine.MULTIPLIERS, "rope_theta", "tie_word_embeddings", "attention_bias"),
        "spkv olmo2": tried_with("rope_theta"),
        "spkv olmo3": tried_with("rope_theta", rope_type=("yarn",), sliding_rope_type=("yarn",)),
        "spkv smollm3": tried_with("rope_theta", "tie_word_embeddings", "no_rope_layers", rope_type=("llama3",)),
    }  # fmt: skip
    program = Program("run_vllm.py", "vllm")
    evidence = "equal to vLLM's report of its capacity"
    note = "layouts per head take the memory of whole layers with as many global heads"
    page_size = 16  # DEFAULT_BLOCK_SIZE on GPUs; 128 on CPUs
    max_sinks = 1
    in_flight = 16384  # of ``vllm serve`` on an H100: max_num_batched_tokens of 8,192 in two batches

    def plan(self, cache: ServedCache, num_global: int) -> CachePlan:
        """Plan the cache of a model in units of one head, or in whole layers."""
        return plan_parts(cache, unit_parts(cache, num_global))

    def plan_layout(self, cache: ServedCache, windows: Sequence[Sequence[int | None]]) -> CachePlan:
        """Plan the cache of a layout, split by kind or into the largest units, whichever takes less memory."""
        layer_counts = [sum(window is None for window in row) for row in windows]
        if {*layer_counts} <= {0, cache.grid[1]}:
            return self.plan(cache, sum(layer_counts))
        size = gcd(cache.grid[1], *layer_counts)
        by_kind = plan_parts(cache, kind_parts(cache, layer_counts))
        units = plan_parts(cache, unit_parts(cache, sum(layer_counts), size))
        if by_kind.request_bytes <= units.request_bytes:
            return replace(by_kind, form="split by kind")
        return replace(units, form=f"units of {size} head{'s' if size > 1 else ''}")


VLLM = Vllm()
