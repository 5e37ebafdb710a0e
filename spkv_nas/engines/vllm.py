"""Describe vLLM, and plan a KV cache as its allocator does (vLLM 0.32, ``v1/core/kv_cache_utils.py``).

An ``Attention`` of vLLM has one window, so a layer whose heads have several is served as several: by kind (one for its
global heads, and one for those of each window), or as units of g heads each, where g divides the number of heads of
each kind in every layer. What each keeps is written into pages of tokens, and:

- All pages get the size of the largest. An ``Attention`` with fewer heads has longer pages where the largest is a
  multiple of its own, and padded ones otherwise.
- Those of equal heads and window form a bucket, and every bucket is split into groups of equal size: as many as the
  smallest bucket has, or as the largest has if that is less than 1.5 times as many. Groups that are not full are
  padded. All members of a group share a page table.
- A request reserves, in every global group, the pages of its maximum length; in every local group, those of the window
  and of the tokens in flight, and one more, because a window may begin inside a page.
- With a sink token every local ``Attention`` has a cache of the first token beside it
  (``serving/vllm/sink_tokens.py``), in a bucket of those of equal heads, whatever the window. A request has a page in
  each of their groups.

Units of any g, and whole layers, give the same memory for the same heads of each kind. The rules are those of cache
layouts whose outermost dimension is the layer, vLLM's default.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import ClassVar

from spkv_nas.engines.engine import CachePlan, PlannedEngine, Program, ServedCache
from spkv_nas.engines.forms import EXACT, OTHER_LAYERS, REFUSED, SPKV_FORMS
from spkv_nas.engines.outcome import Cell, Outcome
from spkv_nas.engines.settings import BASES, MULTIPLIERS, SCALED, tried_with

_FEW_PADDING = 1.5  # the largest bucket sets the size of groups below this multiple of the smallest
_SINK_TOKEN = 0  # in place of a window: the cache of first tokens alone


@dataclass(frozen=True)
class Part:
    """KV heads of a layer that one ``Attention`` serves: their number, and their window."""

    num_heads: int
    window: int | None  # recent keys that they see; None: all


def count_parts(windows: Sequence[Sequence[int | None]], unit: int) -> Counter[Part]:
    """Count the parts of layers whose heads have these windows: units of ``unit`` heads, or by kind if it is 0."""
    parts: Counter[Part] = Counter()
    for row in windows:
        for window, num_heads in Counter(row).items():
            size = unit or num_heads
            parts[Part(size, window)] += num_heads // size
    return parts


def choose_unit(cache: ServedCache, windows: Sequence[Sequence[int | None]]) -> int:
    """Return the heads of a unit, or 0 to split layers by kind, whichever needs less cache for the longest request."""
    unit = gcd(*(num_heads for row in windows for num_heads in Counter(row).values()))
    units = plan_parts(cache, count_parts(windows, unit))
    by_kind = plan_parts(cache, count_parts(windows, 0))
    return unit if units.request_bytes < by_kind.request_bytes else 0


def plan_parts(cache: ServedCache, parts: Mapping[Part, int]) -> CachePlan:
    """Plan the cache of a model with these numbers of parts."""
    # Add the caches of first tokens
    buckets = Counter(parts)
    if cache.sinks:
        for part, count in parts.items():
            if part.window is not None:
                buckets[replace(part, window=_SINK_TOKEN)] += count
    # Split buckets into groups of one size
    group_size = min(buckets.values())
    largest = max(buckets.values())
    if largest < group_size * _FEW_PADDING:
        group_size = largest
    # Bring all pages to one size, and count those of a request of maximum length
    most_heads = max(part.num_heads for part in buckets)
    request_pages = 0
    for part, count in buckets.items():
        page_size = cache.page_size
        if most_heads % part.num_heads == 0:
            page_size *= most_heads // part.num_heads
        num_groups = _ceil_divide(count, group_size)
        request_pages += num_groups * _group_pages(cache, part.window, page_size)
    page_bytes = group_size * cache.page_size * most_heads * cache.head_bytes
    return CachePlan(page_bytes, request_pages)


def _ceil_divide(number: int, size: int) -> int:
    """Return how many parts of a size hold a number."""
    return -(-number // size)


def _group_pages(cache: ServedCache, window: int | None, page_size: int) -> int:
    """Return the pages of a request of maximum length in a group of parts with this window."""
    if window == _SINK_TOKEN:
        return 1
    if window is None:
        return _ceil_divide(cache.context, page_size)
    num_kept = min(window - 1 + cache.in_flight, cache.context)
    return _ceil_divide(num_kept, page_size) + 1


class Vllm(PlannedEngine):
    """vLLM; its cache is planned with the hybrid KV cache manager, one pipeline stage and one tensor-parallel rank."""

    name = "vllm"
    title = "vLLM 0.32"
    outcomes: ClassVar = {
        **dict.fromkeys(
            ("ministral", "gemma3_text", "olmo3", "smollm3", "exaone4", "granite_swa"), EXACT
        ),
        f"gemma3_text{OTHER_LAYERS}": EXACT,
        **dict.fromkeys(
            ("qwen2", "qwen3"),
            Cell(Outcome.EXACT, "with --model-impl transformers; refused without"),
        ),
        **dict.fromkeys(
            ("cohere2", f"cohere2{OTHER_LAYERS}"),
            Cell(
                Outcome.DIFFERENT,
                "one key more than the window; exact with --model-impl transformers",
            ),
        ),
        **dict.fromkeys(
            SPKV_FORMS[:2],
            Cell(Outcome.EXACT, "with spkv-nas in its environment; refused otherwise"),
        ),
        **dict.fromkeys(SPKV_FORMS[2:], REFUSED),
    }
    tried: ClassVar = {
        "ministral": tried_with(
            "rope_theta",
            "tie_word_embeddings",
            "partial_rotary_factor",
            "attention_factor",
            rope_type=SCALED,
            hidden_act=("gelu",),
        ),
        "qwen2": tried_with(
            "rope_theta", "tie_word_embeddings", "attention_factor", rope_type=("yarn",)
        ),
        "qwen3": tried_with(
            "rope_theta", "tie_word_embeddings", "attention_factor", rope_type=SCALED
        ),
        "gemma3_text": tried_with(
            *BASES,
            "query_pre_attn_scalar",
            "tie_word_embeddings",
            "final_logit_softcapping",
            "attention_bias",
            rope_type=SCALED,
            sliding_rope_type=("linear",),
            hidden_activation=("gelu",),
        ),
        "olmo3": tried_with(*BASES, rope_type=("yarn",), sliding_rope_type=("yarn",)),
        "smollm3": tried_with(
            "rope_theta",
            "tie_word_embeddings",
            "attention_bias",
            "no_rope_layers",
            rope_type=("llama3", "yarn"),
        ),
        "exaone4": tried_with(rope_type=("llama3",)),
        "granite_swa": tried_with(
            *MULTIPLIERS,
            "rope_theta",
            "layer_rope_theta",
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
            rope_type=SCALED,
        ),
        # Plug-in: by the model type of the weights
        "spkv llama": tried_with(
            "rope_theta", "tie_word_embeddings", "attention_factor", rope_type=SCALED
        ),
        "spkv mistral": tried_with("rope_theta", "tie_word_embeddings"),
        "spkv ministral": tried_with(),
        "spkv phi3": tried_with("rope_theta", "tie_word_embeddings"),
        "spkv qwen2": tried_with(
            "rope_theta", "tie_word_embeddings", "attention_factor", rope_type=("yarn",)
        ),
        "spkv qwen3": tried_with(
            "rope_theta", "tie_word_embeddings", "attention_factor", rope_type=("llama3", "yarn")
        ),
        "spkv gemma3_text": tried_with(
            *BASES, "query_pre_attn_scalar", "tie_word_embeddings", rope_type=("linear", "llama3")
        ),
        "spkv granite": tried_with(
            *MULTIPLIERS, "rope_theta", "tie_word_embeddings", "attention_bias"
        ),
        "spkv olmo2": tried_with("rope_theta"),
        "spkv olmo3": tried_with("rope_theta", rope_type=("yarn",), sliding_rope_type=("yarn",)),
        "spkv smollm3": tried_with(
            "rope_theta", "tie_word_embeddings", "no_rope_layers", rope_type=("llama3",)
        ),
    }
    program = Program("run_vllm.py", "vllm")
    evidence = "equal to vLLM's report of its capacity"
    note = "layouts per head take the memory of whole layers with as many global heads"
    page_size = 16  # DEFAULT_BLOCK_SIZE on GPUs; 128 on CPUs
    max_sinks = 1
    # Of ``vllm serve`` on an H100: max_num_batched_tokens of 8,192 in two batches
    in_flight = 16384

    def plan(self, cache: ServedCache, num_global: int) -> CachePlan:
        """Plan the cache of a model in units of one head, or in whole layers."""
        windows = (None,) * num_global + (cache.window,) * (cache.num_heads - num_global)
        return plan_parts(cache, count_parts([windows], 1))

    def plan_layout(self, cache: ServedCache, windows: Sequence[Sequence[int | None]]) -> CachePlan:
        """Plan the cache of a layout, split by kind or into the largest units, whichever takes less memory."""
        unit = choose_unit(cache, windows)
        plan = plan_parts(cache, count_parts(windows, unit))
        if all(len(set(row)) == 1 for row in windows):
            return plan
        form = "split by kind"
        if unit:
            form = f"units of {unit} head{'s' if unit > 1 else ''}"
        return replace(plan, form=form)


VLLM = Vllm()
