"""Generate text, one prompt with a report or a batch: with ``SPKVCache`` for gates or a layout, else natively."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from spkv_nas.base import arrays, errors, progress, special_tokens
from spkv_nas.model import attention, config_section, generation_cache, model_shape, modes
from spkv_nas.model.placement import input_device

NOT_FINITE = (  # error for logits that are not finite
    "the model's logits are not finite, so no token can be chosen\n"
    "its weights are damaged or diverged, or its activations overflow in its dtype"
)


@dataclass(frozen=True)
class Generation:
    """Generated text, timing, and cache contents at the end."""

    text: str  # continuation of the prompt
    num_prompt_tokens: int  # tokens of the prompt
    num_new_tokens: int  # generated tokens
    prefill_seconds: float  # time until the first new token
    decode_seconds: float  # time of all other tokens
    cache_bytes: int  # size of the cache, including tables and free pages
    # Size of the keys and values of all tokens, which full attention would store
    full_attention_bytes: int
    # Share of the keys beyond the window that are kept; NaN if there are none, None for a model with neither gates nor
    # a layout
    density: float | None
    tau: float | None  # threshold of the gates; None without gates

    @property
    def tokens_per_second(self) -> float:
        """Return the decoding speed; NaN for a single token, which the prefill generates."""
        if not self.decode_seconds:
            return float("nan")
        return (self.num_new_tokens - 1) / self.decode_seconds


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    tau: float | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    stream: progress.Announce | None = None,
) -> Generation:
    """Continue ``prompt`` until the end-of-text token or ``max_new_tokens``.

    Args:
        model: any causal language model; its gates are hard at ``tau`` while it generates.
        tokenizer: its tokenizer.
        prompt: text of at least one token.
        max_new_tokens: maximum number of tokens to generate.
        tau: threshold in [0, 1]; None takes the model's.
        temperature: sampling temperature; 0 decodes greedily.
        seed: random seed for sampling.
        stream: called with each piece of text as soon as its words are complete.

    Raises ``UserError`` for an empty prompt, unknown tokens, tau outside [0, 1] or without gates, or logits that are
    not finite.
    """
    # Check the arguments and encode the prompt
    gates = config_section.gate_config(model)
    if gates is None and tau is not None:
        raise errors.UserError("this model has no gates, so tau has no effect: leave tau out")
    inputs = _encode(model, tokenizer, prompt)
    num_prompt_tokens = inputs.shape[1]
    model_shape.check_length(
        model, num_prompt_tokens + max_new_tokens - 1, "give a shorter prompt or fewer new tokens"
    )
    # Generate with hard gates
    tau = gates.tau if gates and tau is None else tau
    config = generation_config(model, tokenizer, max_new_tokens, temperature)
    streamer = _TimedStreamer(tokenizer, stream)
    hard_gates = modes.gate_mode(model, "hard", tau) if gates else nullcontext()
    with (
        torch.random.fork_rng(),
        modes.evaluation_mode(model),
        hard_gates,
        decoding_by(model, config),
    ):
        torch.manual_seed(seed)
        result = model.generate(
            input_ids=inputs,
            streamer=streamer,
            logits_processor=transformers.LogitsProcessorList([OnlyFinite()]),
            past_key_values=fitting_cache(model),
            return_dict_in_generate=True,
        )
    # Some models replace the cache on the way
    new_ids = result.sequences[0, num_prompt_tokens:]
    text = tokenizer.decode(new_ids, skip_special_tokens=True)
    token_times = streamer.times
    return _report(text, num_prompt_tokens, len(new_ids), token_times, result.past_key_values, tau)


def _report(
    text: str,
    num_prompt_tokens: int,
    num_new_tokens: int,
    times: Sequence[float],
    cache: Cache,
    tau: float | None,
) -> Generation:
    """Describe a generated text, by the ``times`` of its prompt and of each new token in seconds, and its cache."""
    cache_bytes, full_attention_bytes = _bytes(cache)
    return Generation(
        text=text,
        num_prompt_tokens=num_prompt_tokens,
        num_new_tokens=num_new_tokens,
        prefill_seconds=times[1] - times[0],
        decode_seconds=times[-1] - times[1],
        cache_bytes=cache_bytes,
        full_attention_bytes=full_attention_bytes,
        density=cache.density if isinstance(cache, generation_cache.SPKVCache) else None,
        tau=tau,
    )


def _encode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str
) -> torch.Tensor:
    """Encode a prompt on the model's device, [1, T]. Raises ``UserError`` if it is empty or cannot be encoded."""
    try:
        ids = special_tokens.prompt_tokens(tokenizer, prompt)
    except TypeError as error:  # of the tokenizer: bytes that are not UTF-8, or no string
        raise errors.UserError("the prompt is not UTF-8 text") from error
    if not ids:
        raise errors.UserError("the prompt is empty: give text to continue")
    model_shape.check_tokens(model, max(ids))
    return torch.tensor([ids], device=input_device(model))


@contextmanager
def decoding_by(model: PreTrainedModel, config: transformers.GenerationConfig) -> Iterator[None]:
    """Let ``generate`` follow ``config`` alone in the block, with nothing from the checkpoint, such as penalties."""
    before = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = before


def fitting_cache(model: PreTrainedModel) -> Cache:
    """Create an empty cache: ``SPKVCache`` for a model with gates or a layout, else transformers' own."""
    return (
        generation_cache.SPKVCache(model)
        if attention.attention_layers(model)
        else DynamicCache(config=model.config)
    )


def generation_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    temperature: float = 0.0,
) -> transformers.GenerationConfig:
    """Build the config of ``generate``; the end-of-text token is the model's, or else the tokenizer's."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = tokenizer.eos_token_id
    config = transformers.GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        use_cache=True,
        eos_token_id=eos,
        pad_token_id=eos[0] if isinstance(eos, list) else eos,
    )
    if temperature:
        config.update(temperature=temperature, top_k=0)
    return config


def _bytes(cache: Cache) -> tuple[int, int]:
    """Return the bytes that a cache holds, and those that full attention would hold."""
    if isinstance(cache, generation_cache.SPKVCache):
        return cache.num_bytes, cache.full_attention_bytes
    stored = 0
    seen = 0.0
    for layer in cache.layers:
        size = 2 * layer.keys.numel() * layer.keys.element_size()
        num_stored = layer.keys.shape[2]
        stored += size
        seen += size * (layer.get_seq_length() / num_stored)
    return stored, round(seen)


@dataclass(frozen=True)
class Continuations:
    """Continuations of a batch of prompts."""

    texts: list[str]  # one per prompt
    # Density of each prompt's keys after it, float64 [B]; NaN for a model with neither gates nor a layout, and for a
    # prompt no longer than the window
    densities: arrays.Float


def continue_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: Sequence[int],
) -> Continuations:
    """Decode each prompt greedily, up to its ``max_new_tokens``; special tokens that one spells are text.

    Raises ``UserError``: logits that are not finite.
    """
    # Encode the prompts
    opening = special_tokens.tokens_before(tokenizer)
    ids = [
        [*opening, *special_tokens.encode_text(prompt, tokenizer)["input_ids"]]
        for prompt in prompts
    ]
    longest = max(map(len, ids))
    num_new = max(max_new_tokens)
    positions = model_shape.num_positions(model)
    # Where the longest prompt and the longest answer exceed the table of positions together, answer one by one
    if positions is not None and len(ids) > 1 and longest + num_new - 1 > positions:
        rows = zip(prompts, max_new_tokens, strict=True)
        parts = [continue_greedily(model, tokenizer, [prompt], [number]) for prompt, number in rows]
        texts = [part.texts[0] for part in parts]
        return Continuations(texts, np.concatenate([part.densities for part in parts]))
    # Generate, and record the densities at the first pass, which holds the prompts
    inputs, mask = pad_left(ids)
    densities = np.full(len(ids), np.nan)

    def record(_model: torch.nn.Module, _args: tuple[object, ...], output: Any) -> None:
        hook.remove()
        cache = output.past_key_values
        if isinstance(cache, generation_cache.SPKVCache):  # NaN for a cache of transformers
            densities[:] = cache.densities.cpu().numpy()

    hook = model.register_forward_hook(record)
    try:
        with modes.evaluation_mode(model):
            config = generation_config(model, tokenizer, num_new)
            generated = _generate(model, inputs, mask, config)
    finally:
        hook.remove()
    # Decode
    texts = []
    for row, limit in zip(generated, max_new_tokens, strict=True):
        new_ids = row[longest : longest + limit]
        texts.append(tokenizer.decode(new_ids, skip_special_tokens=True))
    return Continuations(texts, densities)


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of prompts with padding before them, and a mask of 0 for padding, int64 [B, longest prompt]."""
    longest = max(map(len, prompts))
    inputs = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(inputs)
    for row, ids in enumerate(prompts):
        inputs[row, longest - len(ids) :] = torch.tensor(ids)
        mask[row, longest - len(ids) :] = 1
    return inputs, mask


def continue_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: torch.Tensor,
    mask: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seeds: Sequence[tuple[int, int]] = (),
    processors: Sequence[LogitsProcessor] = (),
    cache: Cache | None = None,
) -> list[list[int]]:
    """Continue ``prompts``, int64 [B, T], token by token, and return the new tokens up to an end-of-text token.

    ``mask``, int64 [B, T], is 0 for the first tokens of each prompt that the model does not see, and 1 after them.
    ``temperature`` 0 decodes greedily. ``seeds`` are those of each prompt for sampling; a sample depends on them alone,
    not on the rest of the batch. ``processors`` change the logits. A ``cache`` may hold the beginning of the prompts,
    and holds all but the last new token afterwards. Raises ``UserError`` for logits that are not finite.
    """
    # Continue all rows until the last one ends
    config = generation_config(model, tokenizer, max_new_tokens)
    noise = [_Noise(temperature, seeds)] if temperature else []
    with modes.evaluation_mode(model):
        generated = _generate(model, prompts, mask, config, *noise, *processors, cache=cache)
    # Cut each row after its first end-of-text token
    end = config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    prompt_length = prompts.shape[1]
    rows = []
    for row in generated[:, prompt_length:].tolist():
        lengths = (number for number, token in enumerate(row, 1) if token in ends)
        rows.append(row[: next(lengths, len(row))])
    return rows


def _generate(
    model: PreTrainedModel,
    inputs: torch.Tensor,
    mask: torch.Tensor,
    config: transformers.GenerationConfig,
    *processors: LogitsProcessor,
    cache: Cache | None = None,
) -> torch.Tensor:
    """Generate greedily from ``inputs`` [B, T], where ``mask`` is 1, after ``processors``; int64 [B, T + new]."""
    model_shape.check_length(
        model, inputs.shape[1] + config.max_new_tokens - 1, "give shorter prompts", warns=False
    )
    with decoding_by(model, config):
        generated: torch.Tensor = model.generate(
            input_ids=inputs.to(input_device(model)),
            attention_mask=mask.to(input_device(model)),
            past_key_values=fitting_cache(model) if cache is None else cache,
            logits_processor=transformers.LogitsProcessorList([OnlyFinite(), *processors]),
        )
    return generated


class OnlyFinite(LogitsProcessor):
    """Raise ``UserError`` on NaN or infinite logits, from which decoding picks arbitrary tokens or fails obscurely."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return ``scores`` [B, V] unchanged; -inf is allowed for tokens ruled out before, unless all are."""
        best = scores.amax(-1)  # NaN if any score is
        if not bool(torch.isfinite(best).all()):
            raise errors.UserError(NOT_FINITE)
        return scores


class _TimedStreamer(transformers.TextStreamer):
    """Pass text on to a callback, and record the times of the prompt and of each token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stream: progress.Announce | None
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stream = stream
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Record the time of a prompt or token."""
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass text on to the callback."""
        if self._stream is not None and text:
            self._stream(text)


class _Noise(LogitsProcessor):
    """Add Gumbel noise to logits, so that their maximum is a sample from the softmax at a temperature."""

    def __init__(self, temperature: float, seeds: Sequence[tuple[int, int]]) -> None:
        self._temperature = temperature
        self._generators = [np.random.default_rng(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return noisy logits [B, V]."""
        size = scores.shape[-1]
        rows = [generator.gumbel(size=size) for generator in self._generators]
        noise = torch.from_numpy(np.stack(rows).astype(np.float32))
        return scores.float() / self._temperature + noise.to(scores.device)
