"""Key-value cache that stores only what gates and layouts keep, for ``model.generate(..., past_key_values=...)``.

Prompts of different lengths are padded on the left; padding is never stored. Cache layers of transformers hold the
states of linear attention, state spaces and convolutions. Phi-3 replaces the cache where its RoPE changes;
``return_dict_in_generate`` returns the new one.

Some classes of transformers store a state in the module itself (RecurrentGemma), or ignore it where several tokens
follow a cached prompt (the Mamba layers of Jamba), so that generation would be wrong without an error:
``check_states`` checks that layers without attention keep their states in the cache, and read them again from there.
"""

import copy
from typing import Any

import torch
from spkv_kernels import PagedKVCache
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from spkv_nas.base import arguments
from spkv_nas.base.errors import UserError
from spkv_nas.model import attention, modes, wrappers
from spkv_nas.model.cache_layers import attention_indices, cache_layers, own_cache_class
from spkv_nas.model.layer_cache import SPKVCacheLayer, SPKVHybridCacheLayer, SPKVLatentCacheLayer, local_window

_RING = 128  # ring size of a model without local heads


class SPKVCache(Cache):
    """Key-value cache of a model with gates or a layout, whose sizes are in bytes.

    Example::

        spkv_nas.apply_layout(model, layouts["densest"])
        cache = spkv_nas.SPKVCache(model)
        model.generate(**tokenizer("def add(", return_tensors="pt"), past_key_values=cache, max_new_tokens=16)
        cache.num_bytes, cache.full_attention_bytes
    """

    def __init__(self, model: PreTrainedModel, *, page_size: int = 16, max_pages: int | None = None) -> None:
        """Create an empty cache.

        Args:
            model: a model with gates or a layout.
            page_size: tokens per page, at least 1.
            max_pages: maximum number of pages per layer and window, at least 1; None: no limit.

        Raises ``UserError``: the model has neither gates nor a layout, or a number is too small or not whole.
        """
        page_size = arguments.convert("page_size", int, page_size)
        max_pages = arguments.convert("max_pages", int | None, max_pages)
        for name, number in (("page_size", page_size), ("max_pages", max_pages)):
            if number is not None and number < 1:
                raise UserError(f"{name} must be at least 1; found {number}")
        states = attention.layer_states(model := wrappers.unwrapped(model))
        if not states:
            raise UserError("this model has neither gates nor a layout: generate with transformers' own cache")
        layers = attention.attention_layers(model).values()
        if any(getattr(getattr(layer, "utility_predictor", None), "mix", None) for layer in layers):
            raise UserError("a bidirectional predictor needs future tokens: generate with use_cache=False")
        shared = min((w for state in states if (w := local_window(state)) is not None), default=_RING)
        masks: list[Tensor | None] = [None] * 3
        # Replace the attention layers of the cache that transformers would make
        cache = cache_layers(model.config)
        indices = attention_indices(cache)
        if len(indices) != len(states):
            raise UserError(
                f"{len(states)} layers of this model compute attention, but {len(indices)} layers of transformers' "
                "cache store keys: generate with use_cache=False"
            )
        for index, state in zip(indices, states, strict=True):
            kind, options = SPKVLatentCacheLayer if state.expanded_dim else SPKVCacheLayer, {}
            if isinstance(other := cache[index], LinearAttentionCacheLayerMixin):
                kind, options = SPKVHybridCacheLayer, {"number_of_states": other.number_of_states}
            cache[index] = kind(state, shared, page_size, max_pages, masks, **options)
        Cache.__init__(self, cache)
        # Belong to the cache class that the model insists on, if it has one of its own
        if (own := own_cache_class(model)) is not None:
            self.linear_cache: list[Tensor] = []
            self.__class__ = type(type(self).__name__, (type(self), own), {})

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
        """Keep only the sequences ``indices``."""
        self.reorder_cache(indices)

    @property
    def _paged(self) -> list[PagedKVCache]:
        return [paged for layer in self.layers if isinstance(layer, SPKVCacheLayer) for paged in layer.paged]

    @property
    def num_bytes(self) -> int:
        """Return the size of keys and values in all layers, including free pages and tables."""
        return sum(paged.num_bytes for paged in self._paged)

    @property
    def full_attention_bytes(self) -> int:
        """Return the size of the keys and values of all tokens seen, which full attention would store."""
        return sum(
            int(paged.seq_lens.sum()) * paged.num_kv_heads * 2 * paged.head_dim * paged.pool_k.element_size()
            for paged in self._paged
        )

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
        num_outside = [(paged.seq_lens - paged.window).clamp(min=0) * paged.num_kv_heads for paged in self._paged]
        return torch.stack([paged.lengths.sum(1) for paged in self._paged]).sum(0), torch.stack(num_outside).sum(0)


def check_states(model: PreTrainedModel, kwargs: dict[str, Any], num_cached: int) -> None:
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
    tokens = new_tokens(kwargs)
    if num_cached and not model._spkv_reads_states and tokens is not None and tokens.shape[1] > 1:
        raise UserError(
            f"{type(model).__name__}: its layers without attention ignore their states where several tokens follow "
            "those in a cache\nleave out prefill_chunk_size, and add tokens to a cache one by one"
        )


def new_tokens(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tokens of a call of a model, [B, T], or their embeddings [B, T, C]; None if it has neither."""
    return kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")


@torch.no_grad()
def _reads_states(model: PreTrainedModel) -> bool:
    """Return whether several tokens after those in a cache depend on its states, or there are no states."""
    cache = SPKVCache(model)
    if not cache.states and not getattr(model, "_is_stateful", False):
        return True
    # Fill a cache, with two ids, because the embedding of padding is zero
    tokens = torch.arange(2, device=model.device)[None]
    with modes.evaluation_mode(model):
        model(input_ids=tokens, past_key_values=cache)
        if not cache.states or not all(any(layer.has_previous_state.values()) for layer in cache.states):
            raise UserError(f"{type(model).__name__} keeps states outside of its cache: generate with use_cache=False")
        # Compare the next logits with those after other states
        other = copy.deepcopy(cache)
        recurrent = [state for layer in other.states for state in layer.recurrent_states.values() if state is not None]
        for state in recurrent:
            state += 1
        expected, changed = (model(input_ids=tokens, past_key_values=each).logits for each in (cache, other))
    return not recurrent or not torch.equal(expected, changed)
