"""Generate text with the cache that suits the model, and say what the cache held.

A model with gates or a layout decodes with ``SPKVCache``, any other one with the cache of transformers.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.cache_utils import Cache

from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Announce
from spkv_nas.model.attention import attention_layers
from spkv_nas.model.config_section import gate_config
from spkv_nas.model.generation_cache import SPKVCache
from spkv_nas.model.model_shape import check_tokens
from spkv_nas.model.modes import evaluation_mode, gate_mode

NOT_FINITE = (  # the error for logits that are not
    "the model's logits are not finite, so no token can be chosen\nits weights are damaged or diverged, or its "
    "activations overflow in its dtype"
)


@dataclass(frozen=True)
class Generation:
    """What was generated, how fast, and what the cache held at the end.

    Attributes:
        prefill_seconds: until the first new token; ``decode_seconds`` for all the others.
        cache_bytes: of the cache, tables and free pages included.
        full_attention_bytes: of the keys and values of all tokens, which full attention would hold.
        density: share of the keys beyond the window that are kept; NaN if there are none, None for a model with neither
            gates nor a layout.
        tau: threshold of the gates, None without any.
    """

    text: str
    num_prompt_tokens: int
    num_new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    cache_bytes: int
    full_attention_bytes: int
    density: float | None
    tau: float | None

    @property
    def tokens_per_second(self) -> float:
        """Of decoding; NaN for a single token, which the prefill gives."""
        return (self.num_new_tokens - 1) / self.decode_seconds if self.decode_seconds else float("nan")


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    tau: float | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stream: Announce | None = None,
) -> Generation:
    """Continue ``prompt`` until the end-of-text token or ``max_new_tokens``.

    Args:
        model: any causal language model; gates are hard at ``tau`` while it generates.
        prompt: text of at least one token.
        tau: threshold in [0, 1]; None takes the model's own.
        temperature: 0 takes the likeliest token, more samples.
        top_p: sample among the likeliest tokens that together have this probability.
        seed: of the samples.
        stream: called with each piece of text as soon as its words are complete.

    Raises:
        UserError: an empty prompt, one with tokens that the model does not have, a threshold that is outside [0, 1] or
            for a model without gates, or logits that are not finite.
    """
    gates = gate_config(model)
    if gates is None and tau is not None:
        raise UserError("this model has no gates, so a threshold means nothing to it: leave tau out")
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    num_prompt_tokens = inputs["input_ids"].shape[1]
    if num_prompt_tokens == 0:
        raise UserError("the prompt is empty: give some text to continue")
    check_tokens(model, int(inputs["input_ids"].max()))
    tau = gates.tau if gates and tau is None else tau
    config = generation_config(model, tokenizer, max_new_tokens, temperature, top_p)
    streamer = _TimedStreamer(tokenizer, stream)
    as_hard = gate_mode(model, "hard", tau) if gates else nullcontext()
    with torch.random.fork_rng(), evaluation_mode(model), as_hard:
        torch.manual_seed(seed)
        cache = fitting_cache(model)
        ids = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_config=config,
            past_key_values=cache, streamer=streamer, logits_processor=LogitsProcessorList([OnlyFinite()]),
        )  # fmt: skip
    new = ids[0, num_prompt_tokens:]
    used, full = _bytes(cache)
    return Generation(
        text=tokenizer.decode(new, skip_special_tokens=True),
        num_prompt_tokens=num_prompt_tokens,
        num_new_tokens=len(new),
        prefill_seconds=streamer.times[1] - streamer.times[0],
        decode_seconds=streamer.times[-1] - streamer.times[1],
        cache_bytes=used,
        full_attention_bytes=full,
        density=cache.density if isinstance(cache, SPKVCache) else None,
        tau=tau,
    )


def fitting_cache(model: PreTrainedModel) -> Cache:
    """An empty cache of what the model's gates or layout keep; of one with neither, transformers' own."""
    return SPKVCache(model) if attention_layers(model) else DynamicCache(config=model.config)


def generation_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> GenerationConfig:
    """What transformers is told; the end-of-text token is the model's own, or else the tokenizer's."""
    own = model.generation_config
    eos = own.eos_token_id if own is not None and own.eos_token_id is not None else tokenizer.eos_token_id
    options: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
    return GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=temperature > 0, use_cache=True, eos_token_id=eos,
        pad_token_id=eos[0] if isinstance(eos, list) else eos, **options,
    )  # fmt: skip


def _bytes(cache: Cache) -> tuple[int, int]:
    """(bytes held, bytes that full attention would hold)."""
    if isinstance(cache, SPKVCache):
        return cache.num_bytes, cache.full_attention_bytes
    sizes = [2 * layer.keys.numel() * layer.keys.element_size() for layer in cache.layers]
    seen = [layer.get_seq_length() / layer.keys.shape[2] for layer in cache.layers]
    return sum(sizes), round(sum(size * more for size, more in zip(sizes, seen, strict=True)))


class OnlyFinite(LogitsProcessor):
    """Stops at logits that are NaN or infinite, of which the likeliest would be any token, and sampling fails oddly."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` [B, V] as they are; -inf is a token that was ruled out before, unless all are."""
        best = scores.amax(-1)  # NaN if one of them is
        if not bool(torch.isfinite(best).all()):
            raise UserError(NOT_FINITE)
        return scores


class _TimedStreamer(TextStreamer):
    """Hands text on, and keeps when the prompt and each token came."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stream: Announce | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stream = stream
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._stream is not None and text:
            self._stream(text)
