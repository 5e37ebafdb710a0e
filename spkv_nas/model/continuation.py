"""Continue a batch of prompts, as benchmarks require, in the gate mode that the caller sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from spkv_nas.base.special_tokens import prompt_tokens
from spkv_nas.model import model_shape, modes
from spkv_nas.model.generation import OnlyFinite, decoding_by, fitting_cache, generation_config
from spkv_nas.model.generation_cache import SPKVCache


@dataclass(frozen=True)
class Continuations:
    """Continuations of a batch of prompts."""

    texts: list[str]  # one per prompt
    # float64 [B], density of each prompt's keys after it; NaN for a model with neither gates nor a layout, and for a
    # prompt no longer than the window
    densities: NDArray[np.float64]


def continue_greedily(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: Sequence[int]
) -> Continuations:
    """Decode the most probable continuation of each prompt, up to its ``max_new_tokens``.

    Raises ``UserError``: logits that are not finite.
    """
    # Encode the prompts
    ids = [prompt_tokens(tokenizer, prompt) for prompt in prompts]
    longest, positions = max(map(len, ids)), model_shape.num_positions(model)
    # Where the longest prompt and the longest answer exceed the table of positions together, answer one by one
    if positions is not None and len(ids) > 1 and longest + max(max_new_tokens) - 1 > positions:
        rows = zip(prompts, max_new_tokens, strict=True)
        parts = [continue_greedily(model, tokenizer, [prompt], [number]) for prompt, number in rows]
        return Continuations([part.texts[0] for part in parts], np.concatenate([part.densities for part in parts]))
    # Pad on the left: [B, longest prompt]
    inputs, mask = (torch.zeros(len(ids), longest, dtype=torch.long) for _ in range(2))
    for row, prompt_ids in enumerate(ids):
        inputs[row, longest - len(prompt_ids) :] = torch.tensor(prompt_ids)
        mask[row, longest - len(prompt_ids) :] = 1
    # Generate, and record the densities at the first pass, which holds the prompts
    densities = np.full(len(ids), np.nan)

    def record(_model: Any, _args: Any, output: Any) -> None:
        hook.remove()
        if isinstance(output.past_key_values, SPKVCache):  # NaN for a cache of transformers
            densities[:] = output.past_key_values.densities.cpu().numpy()

    hook = model.register_forward_hook(record)
    try:
        with modes.evaluation_mode(model):
            generated = _generate(model, inputs, mask, generation_config(model, tokenizer, max(max_new_tokens)))
    finally:
        hook.remove()
    # Decode
    new_ids = [row[longest : longest + limit] for row, limit in zip(generated, max_new_tokens, strict=True)]
    return Continuations([tokenizer.decode(row, skip_special_tokens=True) for row in new_ids], densities)


def continue_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seeds: Sequence[tuple[int, int]] = (),
) -> list[list[int]]:
    """Continue ``prompts``, int64 [B, T], token by token, and return the new tokens up to an end-of-text token.

    ``temperature`` 0 decodes greedily. ``seeds`` are those of each prompt for sampling; a sample depends on them alone,
    not on the rest of the batch. Raises ``UserError`` for logits that are not finite.
    """
    # Continue all rows until the last one ends
    config = generation_config(model, tokenizer, max_new_tokens)
    noise = [_Noise(temperature, seeds)] if temperature else []
    with modes.evaluation_mode(model):
        generated = _generate(model, prompts, torch.ones_like(prompts), config, *noise)
    # Cut each row after its first end-of-text token
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    rows = []
    for row in generated[:, prompts.shape[1] :].tolist():
        length = next((number for number, token in enumerate(row, 1) if token in ends), len(row))
        rows.append(row[:length])
    return rows


def _generate(
    model: PreTrainedModel,
    inputs: Tensor,
    mask: Tensor,
    config: GenerationConfig,
    *processors: LogitsProcessor,
) -> Tensor:
    """Generate greedily from ``inputs`` [B, T], where ``mask`` is 1, after ``processors``; int64 [B, T + new]."""
    model_shape.check_length(model, inputs.shape[1] + config.max_new_tokens - 1, "give shorter prompts", warns=False)
    with decoding_by(model, config):
        generated: Tensor = model.generate(
            input_ids=inputs.to(model.device),
            attention_mask=mask.to(model.device),
            past_key_values=fitting_cache(model),
            logits_processor=LogitsProcessorList([OnlyFinite(), *processors]),
        )
    return generated


class _Noise(LogitsProcessor):
    """Add Gumbel noise to logits, so that their maximum is a sample from the softmax at a temperature."""

    def __init__(self, temperature: float, seeds: Sequence[tuple[int, int]]) -> None:
        self._temperature = temperature
        self._generators = [np.random.default_rng(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return noisy logits [B, V]."""
        size = scores.shape[-1]
        noise = np.stack([generator.gumbel(size=size).astype(np.float32) for generator in self._generators])
        return scores.float() / self._temperature + torch.from_numpy(noise).to(scores.device)
