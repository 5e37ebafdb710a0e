"""Continue many prompts at once by the likeliest tokens, as benchmarks ask it of a model.

``generation`` continues one prompt for a reader. Here the mode of the gates is the caller's business: hard, or windows
in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from spkv_nas.model.generation import OnlyFinite, fitting_cache, generation_config
from spkv_nas.model.generation_cache import SPKVCache
from spkv_nas.model.modes import evaluation_mode


@dataclass(frozen=True)
class Continuations:
    """What came after each prompt, and the density of its keys then [B]: NaN for a model with neither gates nor a
    layout, and for a prompt no longer than the window.
    """

    texts: list[str]
    densities: NDArray[np.float64]


def continue_greedily(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: Sequence[int]
) -> Continuations:
    """The likeliest continuation of each prompt, of at most so many tokens each.

    Raises:
        UserError: logits that are not finite.
    """
    ids = [tokenizer(prompt, verbose=False)["input_ids"] for prompt in prompts]
    longest = max(map(len, ids))
    inputs, real = (torch.zeros(len(ids), longest, dtype=torch.long) for _ in range(2))
    for row, own in enumerate(ids):  # padded on the left, where nothing sees it
        inputs[row, longest - len(own) :] = torch.tensor(own)
        real[row, longest - len(own) :] = 1
    with evaluation_mode(model):
        cache = fitting_cache(model)
        density = _DensityOfPrompts(cache)
        found = model.generate(
            input_ids=inputs.to(model.device), attention_mask=real.to(model.device), past_key_values=cache,
            generation_config=generation_config(model, tokenizer, max(max_new_tokens)),
            logits_processor=LogitsProcessorList([OnlyFinite(), density]),
        )  # fmt: skip
    new = [row[longest : longest + most] for row, most in zip(found, max_new_tokens, strict=True)]
    return Continuations([tokenizer.decode(row, skip_special_tokens=True) for row in new], density.found)


class _DensityOfPrompts(LogitsProcessor):
    """Notes what a cache holds when the first token is chosen; rows that end early later add tokens that are none."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.found = np.empty(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` as they are."""
        if not len(self.found):
            known = isinstance(self._cache, SPKVCache)
            self.found = self._cache.densities.cpu().numpy() if known else np.full(len(scores), np.nan)
        return scores
