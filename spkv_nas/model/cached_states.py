"""Check that layers without attention keep their states in the cache, and read them again from there.

Some classes of transformers store a state in the module itself (RecurrentGemma), or ignore it where several tokens
follow a cached prompt (the Mamba layers of Jamba). Generation would then be wrong without an error.
"""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.model import modes
from spkv_nas.model.generation_cache import SPKVCache


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
