"""Key-value cache that stores only what gates and layouts keep, for ``model.generate(..., past_key_values=...)``.

Prompts of different lengths are padded on the left; padding is never stored. Cache layers of transformers hold the
states of linear attention, state spaces and convolutions. Phi-3 replaces the cache where its RoPE changes;
``return_dict_in_generate`` returns the new one.

Some classes of transformers store a state in the module itself (RecurrentGemma), or ignore it where several tokens
follow a cached prompt (the Mamba layers of Jamba), so that generation would be wrong without an error:
``check_states`` checks that layers without attention keep their states in the cache, and read them again from there.
"""

import copy
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from spkv_kernels import PagedKVCache
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from spkv_nas.base import arguments
from spkv_nas.base.errors import UserError
from spkv_nas.model import (
    attention,
    attention_calls,
    call_inputs,
    layer_places,
    modes,
    placement,
    wrappers,
)
from spkv_nas.model.cache_layers import attention_indices, cache_layers, own_cache_class
from spkv_nas.model.layer_cache import (
    SPKVCacheLayer,
    SPKVHybridCacheLayer,
    SPKVLatentCacheLayer,
    local_window,
)

_RING = 128  # ring size of a model without local heads
_START_AGAIN = "start with spkv_nas.SPKVCache(model), or empty this cache with its reset()"


class SPKVCache(Cache):
    """Key-value cache of a model with gates or a layout, whose sizes are in bytes.

    Example::

        spkv_nas.apply_layout(model, layouts["densest"])
        cache = spkv_nas.SPKVCache(model)
        model.generate(**tokenizer("def add(", return_tensors="pt"), past_key_values=cache, max_new_tokens=16)
        cache.num_bytes, cache.full_attention_bytes
    """

    # One per layer: ``SPKVCacheLayer`` for attention, or a layer of transformers for other states
    layers: list[Any]

    def __init__(
        self, model: PreTrainedModel, *, page_size: int = 16, max_pages: int | None = None
    ) -> None:
        """Create an empty cache.

        Args:
            model: a model with gates or a layout; any other raises ``UserError``.
            page_size: tokens per page, at least 1.
            max_pages: maximum number of pages per layer and window, at least 1; None: no limit.

        Raises ``UserError``: an argument is of the wrong kind, or the model cannot use a cache.
        """
        self._page_size = arguments.convert("page_size", int, page_size)
        self._max_pages = arguments.convert("max_pages", int | None, max_pages)
        numbers = {"page_size": self._page_size, "max_pages": self._max_pages}
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise UserError(f"{name} must be at least 1; found {number}")
        model = wrappers.unwrapped(model)
        Cache.__init__(self, _empty_layers(model, self._page_size, self._max_pages))
        self._belong_to(model)

    def _belong_to(self, model: PreTrainedModel) -> None:
        """Remember what the layers were made for: the model, and the gates or layout that it has now."""
        self._model: weakref.ref[PreTrainedModel] | None = weakref.ref(model)
        self._gates = _gates(model)
        self._heads = _heads(model)
        # Belong to the cache class that the model insists on, if it has one of its own
        required = own_cache_class(model)
        if required is not None and not isinstance(self, required):
            self.linear_cache: list[Tensor] = []
            current = type(self)
            self.__class__ = type(current.__name__, (current, required), {})

    def __getstate__(self) -> dict[str, object]:
        """Return what is pickled: all but the model and its gates, so that a loaded copy fits any model like it."""
        return {**vars(self), "_model": None, "_gates": None}

    def __deepcopy__(self, memo: dict[int, object]) -> "SPKVCache":
        """Return a copy, which belongs to the same model."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in vars(self).items():
            setattr(copied, name, copy.deepcopy(value, memo))
        return copied

    def prepare_call(self, model: PreTrainedModel, batch_size: int | None) -> None:
        """Prepare for a call of ``model`` on ``batch_size`` sequences (None: not known).

        An empty cache follows the model's present gates or layout. Raises ``UserError`` if a filled one holds tokens of
        another model, of other gates or another layout, of a call that was interrupted, or of another batch size.
        """
        problem = self._misfit(model)
        is_empty = all(layer.tokens == 0 for layer in self._attending)
        # Follow the model with an empty cache
        if is_empty and problem is not None:
            self.layers = _empty_layers(model, self._page_size, self._max_pages)
            self._belong_to(model)
        if is_empty:
            return
        # Check what a filled cache holds
        num_stored = self._paged[0].batch_size
        if problem is None and batch_size not in (None, num_stored):
            problem = f"holds {num_stored} sequences, this batch has {batch_size}"
        if problem is not None:
            raise UserError(f"past_key_values {problem}: {_START_AGAIN}")

    def _misfit(self, model: PreTrainedModel) -> str | None:
        """Return why the cache does not fit a model and its present gates or layout, as a clause; None if it does."""
        lengths = {layer.tokens for layer in self._attending}
        if len(lengths) > 1 or any(layer.is_interrupted for layer in self._attending):
            return (
                "was left by a call that was interrupted, which stored its tokens in some layers "
                "only"
            )
        if self._model is not None and self._model() is not model:
            return "was filled by another model"
        has_gates = self._gates is None or self._gates() is model._spkv_states[0].settings
        if not has_gates or self._heads != _heads(model):
            return (
                "was filled under another layout, or other gates, gate mode or tau, "
                "than the model has now"
            )
        return None

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state of a lightning attention layer, as MiniMax asks for it; None before the first token."""
        state: Tensor | None = self.get_recurrent_state(layer_idx)
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Store the state of a lightning attention layer."""
        self.update_recurrent_state(linear_cache, layer_idx)
        self.layers[layer_idx].has_previous_state[0] = True

    @property
    def states(self) -> list[LinearAttentionCacheLayerMixin]:
        """Return the layers with a state besides keys and values: linear attention, state spaces, convolutions."""
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        if self._paged:
            self.reorder_cache(torch.arange(self._paged[0].batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences ``indices``: numbers of rows, or bool [B]."""
        rows = torch.as_tensor(indices)
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        self.reorder_cache(rows)

    @property
    def _attending(self) -> list[SPKVCacheLayer]:
        """Return the layers with keys and values."""
        return [layer for layer in self.layers if isinstance(layer, SPKVCacheLayer)]

    @property
    def _paged(self) -> list[PagedKVCache]:
        """Return the paged caches of all layers, one per ring size."""
        return [paged for layer in self._attending for paged in layer.paged]

    @property
    def num_bytes(self) -> int:
        """Return the size of keys and values in all layers, including free pages and tables."""
        return sum(paged.num_bytes for paged in self._paged)

    @property
    def full_attention_bytes(self) -> int:
        """Return the size of the keys and values of all tokens seen, which full attention would store."""
        total = 0
        for paged in self._paged:
            num_tokens = int(paged.seq_lens.sum())
            num_values = 2 * paged.num_kv_heads * paged.head_dim
            total += num_tokens * num_values * paged.pool_k.element_size()
        return total

    @property
    def density(self) -> float:
        """Return the share of tokens beyond the window that are kept, averaged over heads; NaN if there are none."""
        kept, num_outside = (float(count.sum()) for count in self._counts())
        return kept / num_outside if num_outside else float("nan")

    @property
    def densities(self) -> Tensor:
        """Return the ``density`` of each sequence, float64 [B]; [0] for an empty cache."""
        kept, num_outside = self._counts()
        return kept.double() / num_outside

    def _counts(self) -> tuple[Tensor, Tensor]:
        """Return how many tokens beyond the window are kept, and how many there are, over all heads; each int64 [B]."""
        if not self._paged:
            return torch.empty(0), torch.empty(0)
        num_kept = []
        num_outside = []
        for paged in self._paged:
            num_kept.append(paged.lengths.sum(1))
            outside = (paged.seq_lens - paged.window).clamp(min=0)
            num_outside.append(outside * paged.num_kv_heads)
        return torch.stack(num_kept).sum(0), torch.stack(num_outside).sum(0)


def _empty_layers(model: PreTrainedModel, page_size: int, max_pages: int | None) -> list[Any]:
    """Return the empty layers of a cache for the present gates or layout of a model.

    Raises ``UserError``: it has neither, or no cache can hold what it stores.
    """
    states = attention.layer_states(model)
    if not states:
        raise UserError(
            "this model has neither gates nor a layout: generate with transformers' own cache"
        )
    attending = attention.attention_layers(model).values()
    if any(getattr(getattr(layer, "utility_predictor", None), "mix", None) for layer in attending):
        raise UserError(
            "a bidirectional predictor needs future tokens: generate with use_cache=False"
        )
    shared = _shared_window(states)
    masks: list[Tensor | None] = [None] * 3
    # Replace the attention layers of the cache that transformers would make
    layers = cache_layers(model.config)
    indices = attention_indices(layers)
    if len(indices) != len(states):
        raise UserError(
            f"{len(states)} layers of this model compute attention, "
            f"but {len(indices)} layers of transformers' cache store keys: "
            "generate with use_cache=False"
        )
    layer_places.check_numbers(model, list(attending), indices)
    for index, state in zip(indices, states, strict=True):
        kind = SPKVLatentCacheLayer if state.expanded_dim else SPKVCacheLayer
        options = {}
        replaced = layers[index]
        if isinstance(replaced, LinearAttentionCacheLayerMixin):
            kind = SPKVHybridCacheLayer
            options["number_of_states"] = replaced.number_of_states
        layers[index] = kind(state, shared, page_size, max_pages, masks, **options)
    return layers


def _shared_window(states: Sequence[attention.LayerState]) -> int:
    """Return the ring size of layers without local heads: the smallest of the others."""
    windows = [local_window(state) for state in states]
    return min((window for window in windows if window is not None), default=_RING)


def _gates(model: PreTrainedModel) -> "weakref.ref[attention.GateSettings] | None":
    """Return a reference to the gate settings of a hooked model, which new gates replace; None if no gate decides."""
    states = model._spkv_states
    is_gated = any(state.gate_window is not None and state.windows is None for state in states)
    return weakref.ref(states[0].settings) if is_gated else None


def _heads(model: PreTrainedModel) -> Hashable:
    """Return what decides which keys a hooked model's heads see: windows, sinks, and the mode and tau of its gates."""
    states = model._spkv_states
    settings = states[0].settings if _gates(model) is not None else None
    layers = tuple(
        (state.windows, state.gate_window, state.sinks, state.learned_sinks) for state in states
    )
    mode = None if settings is None else (settings.mode, settings.tau)
    return layers, mode


def check_states(model: PreTrainedModel, kwargs: attention_calls.Keywords, num_cached: int) -> None:
    """Raise ``UserError`` if a call with a cache of ``num_cached`` tokens would lose states of a hooked model.

    The first call on a model finds out, in three passes over two tokens.
    """
    if torch.compiler.is_compiling():
        return
    # Find out once, with passes that call this function again
    if not hasattr(model, "_spkv_reads_states"):
        model._spkv_reads_states = True
        try:
            model._spkv_reads_states = _reads_states(model)
        except BaseException:
            del model._spkv_reads_states
            raise
    # Refuse what would be wrong
    tokens = call_inputs.new_tokens(kwargs)
    if num_cached and not model._spkv_reads_states and tokens is not None and tokens.shape[1] > 1:
        raise UserError(
            f"{type(model).__name__}: its layers without attention ignore their states where "
            "several tokens follow those in a cache\n"
            "leave out prefill_chunk_size, and add tokens to a cache one by one"
        )


@torch.no_grad()
def _reads_states(model: PreTrainedModel) -> bool:
    """Return whether several tokens after those in a cache depend on its states, or there are no states."""
    cache = SPKVCache(model)
    if not cache.states and not getattr(model, "_is_stateful", False):
        return True
    # Fill a cache, with two ids, because the embedding of padding is zero
    tokens = torch.arange(2, device=placement.input_device(model))[None]
    with modes.evaluation_mode(model):
        model(input_ids=tokens, past_key_values=cache)
        is_filled = [any(layer.has_previous_state.values()) for layer in cache.states]
        if not is_filled or not all(is_filled):
            raise UserError(
                f"{type(model).__name__} keeps states outside of its cache: "
                "generate with use_cache=False"
            )
        # Compare the next logits with those after other states
        other = copy.deepcopy(cache)
        num_changed = _change_states(other)
        expected = model(input_ids=tokens, past_key_values=cache).logits
        changed = model(input_ids=tokens, past_key_values=other).logits
    return num_changed == 0 or not torch.equal(expected, changed)


def _change_states(cache: SPKVCache) -> int:
    """Add 1 to the recurrent states in a cache, in place, and return how many there are."""
    states = [state for layer in cache.states for state in layer.recurrent_states.values()]
    recurrent = [state for state in states if state is not None]
    for state in recurrent:
        state += 1
    return len(recurrent)
