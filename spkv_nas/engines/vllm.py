"""Describe vLLM, and plan a KV cache as its allocator does (vLLM 0.32, ``v1/core/kv_cache_utils.py``).

An ``Attention`` of vLLM has one window, so a layer whose heads have several is served as several: by kind (one for its
global heads, and one for those of each window), or as units of g heads each, where g divides the number of heads of
each kind in every layer. What each keeps is written into pages of tokens, and:

- Where all keep all tokens, or the same window, they share one page table, whatever their sizes.
- Otherwise all pages get the size of the largest. An ``Attention`` with smaller pages has longer ones where the largest
  is a multiple of its own, and padded ones otherwise.
- Those that keep the same form a bucket, and every bucket is split into groups of equal size: as many as the
  smallest bucket has, or as the largest has if that is less than 1.5 times as many. Groups that are not full are
  padded. All members of a group share a page table.
- A request reserves, in every global group, the pages of its maximum length; in every local group, those of the window
  and of the tokens in flight, and one more, because a window may begin inside a page.
- A state of linear attention, a state space or a convolution takes a page, so the pages of attention are made long
  enough for the largest state (``platforms/interface.py``, ``_align_hybrid_block_size``). With prefix caching a request
  has two of them: the current state, and the last one that may be shared.
- With a sink token every local ``Attention`` has a cache of the first token beside it
  (``serving/vllm/sink_tokens.py``), in a bucket of those of equal heads, whatever the window. A request has a page in
  each of their groups.

Units of any g, and whole layers, give the same memory for the same heads of each kind. The rules are those of cache
layouts whose outermost dimension is the layer, vLLM's default.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd
from typing import ClassVar

from spkv_nas.engines.cache import (
    CachePlan,
    CacheSettings,
    LayerCache,
    ModelCache,
    Row,
    ceil_divide,
    round_up,
)
from spkv_nas.engines.engine import PlannedEngine, Program
from spkv_nas.engines.forms import EXACT, OTHER_LAYERS, REFUSED, SPKV_FORMS
from spkv_nas.engines.outcome import Cell, Outcome
from spkv_nas.engines.settings import BASES, MULTIPLIERS, SCALED, tried_with

_FEW_PADDING = 1.5  # the largest bucket sets the size of groups below this multiple of the smallest
_SINK_TOKEN = 0  # in place of a window: the cache of first tokens alone
# Pages of a state with prefix caching: the current one, and one that may be shared
_STATE_PAGES = 2


def count_parts(
    rows: Sequence[Sequence[int | None]], unit: int, head: LayerCache
) -> Counter[LayerCache]:
    """Count the parts of layers whose KV heads have these windows (None: global).

    ``head`` is what one of their heads keeps. Parts are units of ``unit`` heads, or by kind if it is 0.
    """
    parts: Counter[LayerCache] = Counter()
    for row in rows:
        for window, num_heads in Counter(row).items():
            size = unit or num_heads
            sinks = 0 if window is None else head.sinks
            part = replace(head, num_heads=size, window=window, sinks=sinks)
            parts[part] += num_heads // size
    return parts


def in_units(parts: Mapping[LayerCache, int]) -> tuple[int, Counter[LayerCache]]:
    """Divide parts by kind into the largest units of equal numbers of heads; return their size and count."""
    unit = gcd(*(part.num_heads for part in parts))
    units: Counter[LayerCache] = Counter()
    for part, count in parts.items():
        units[replace(part, num_heads=unit)] += count * (part.num_heads // unit)
    return unit, units


def choose_unit(parts: Mapping[LayerCache, int], settings: CacheSettings, context: int) -> int:
    """Return the heads of a unit, or 0 to keep parts by kind, whichever needs less cache for the longest request."""
    unit, units = in_units(parts)
    divided = plan_parts(units, settings, context)
    by_kind = plan_parts(parts, settings, context)
    return unit if divided.request_bytes < by_kind.request_bytes else 0


def plan_parts(
    parts: Mapping[LayerCache, int],
    settings: CacheSettings,
    context: int,
    item_bytes: Fraction = Fraction(2),
    activation_bytes: int = 2,
) -> CachePlan:
    """Plan the cache of a model with these numbers of parts, with one spare page.

    A number takes ``item_bytes`` in keys and values and ``activation_bytes`` in states. Without a pool of pages of one
    size the page is that of all layers together.
    """
    buckets = _buckets(parts)
    if len({(part.window, part.state) for part in buckets}) == 1:
        return _plan_one_group(buckets, settings, context, item_bytes, activation_bytes)
    # Split buckets into groups of one size
    group_size = min(buckets.values())
    largest = max(buckets.values())
    if largest < group_size * _FEW_PADDING:
        group_size = largest
    # Bring all pages to one size, and count those of a request of maximum length
    tokens = _tokens_per_page(buckets, settings, item_bytes, activation_bytes)
    sizes = {
        part: _page_bytes(part, tokens, item_bytes, activation_bytes)
        for part in buckets
        if part.state is None
    }
    page_bytes = max(sizes.values())
    rows = []
    request_pages = 0
    for part, count in buckets.items():
        longer = 1
        if part in sizes and page_bytes % sizes[part] == 0:
            longer = page_bytes // sizes[part]
        num_groups = ceil_divide(count, group_size)
        pages = num_groups * _group_pages(part, tokens * longer, settings, context)
        request_pages += pages
        rows.append(Row(part, count, pages * page_bytes * group_size))
    return CachePlan(page_bytes * group_size, request_pages, tuple(rows), spare_pages=1)


def _buckets(parts: Mapping[LayerCache, int]) -> Counter[LayerCache]:
    """Return parts that keep the same, with the caches of first tokens among them."""
    buckets: Counter[LayerCache] = Counter()
    for part, count in parts.items():
        buckets[replace(part, sinks=0)] += count
        if part.sinks and part.window is not None:
            buckets[replace(part, sinks=0, window=_SINK_TOKEN)] += count
    return buckets


def _plan_one_group(
    buckets: Mapping[LayerCache, int],
    settings: CacheSettings,
    context: int,
    item_bytes: Fraction,
    activation_bytes: int,
) -> CachePlan:
    """Plan parts that all keep as many tokens, or a state, and share one page table."""
    sizes = {
        part: count * _page_bytes(part, settings.page_size, item_bytes, activation_bytes)
        for part, count in buckets.items()
    }
    pages = _group_pages(next(iter(buckets)), settings.page_size, settings, context)
    rows = [Row(part, buckets[part], pages * size) for part, size in sizes.items()]
    return CachePlan(sum(sizes.values()), pages, tuple(rows), spare_pages=1)


def _page_bytes(part: LayerCache, tokens: int, item_bytes: Fraction, activation_bytes: int) -> int:
    """Return the bytes of a page of some tokens, or of a state."""
    if part.state is None:
        return int(tokens * part.token_numbers * item_bytes)
    recurrent = {None: activation_bytes, "float32": 4}.get(part.state.dtype, 2)
    return part.state.convolution * activation_bytes + part.state.recurrent * recurrent


def _tokens_per_page(
    buckets: Mapping[LayerCache, int],
    settings: CacheSettings,
    item_bytes: Fraction,
    activation_bytes: int,
) -> int:
    """Return the tokens of a page of attention, which is at least as large as a state."""
    states = [
        _page_bytes(part, 0, item_bytes, activation_bytes)
        for part in buckets
        if part.state is not None
    ]
    if not states:
        return settings.page_size
    token_bytes = max(int(part.token_numbers * item_bytes) for part in buckets)
    needed = ceil_divide(max(states), token_bytes)
    return max(settings.page_size, round_up(needed, settings.page_size))


def _group_pages(part: LayerCache, page_size: int, settings: CacheSettings, context: int) -> int:
    """Return the pages of a request of maximum length in a group of parts that keep the same."""
    if part.state is not None:
        return _STATE_PAGES if settings.caches_prefixes else 1
    if part.window == _SINK_TOKEN:
        return 1
    if part.window is None:
        return ceil_divide(context, page_size)
    num_kept = min(part.window - 1 + settings.in_flight, context)
    return ceil_divide(num_kept, page_size) + 1


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
    evidence = "equal to vLLM's own allocator, given what layers keep"
    note = "with the hybrid KV cache manager, and the cache's layout by layer"
    uncounted = (
        "pipeline parallelism",
        "speculative decoding",
        "scales of a quantised cache",
        "images and encoders",
    )
    # DEFAULT_BLOCK_SIZE on GPUs, 128 on CPUs; tokens in flight of ``vllm serve`` on an H200: max_num_batched_tokens of
    # 8,192 in two batches
    defaults = CacheSettings(page_size=16, in_flight=16384)
    settings = ("page-size", "in-flight-tokens", "tensor-parallel", "windows", "prefix-caching")
    serves_any_layout = True
    max_sinks = 1
    max_windows = 3  # each has groups of pages of its own

    def _plan(self, model: ModelCache, settings: CacheSettings, context: int) -> CachePlan:
        """Plan a model by whole layers, or divided ones by kind or in units, whichever takes less."""
        parts: Mapping[LayerCache, int] = model.parts
        item_bytes = settings.item_bytes(model.dtype, self.sizes)
        activation_bytes = int(self.sizes[model.dtype])
        form = "whole layers"
        if model.is_split:
            form = "split by kind"
            unit = choose_unit(parts, settings, context)
            if unit:
                parts = in_units(parts)[1]
                form = f"units of {unit} head{'s' if unit > 1 else ''}"
        plan = plan_parts(parts, settings, context, item_bytes, activation_bytes)
        return replace(plan, form=form)


VLLM = Vllm()
