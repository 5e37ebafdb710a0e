"""LongPPL (arXiv 2410.23771): perplexity of the tokens that only the long context makes likely.

An evaluator reads each text twice: whole, and with no more than ``short`` to ``short + stride`` tokens before each. A
token is key where the short context costs it more than ``alpha`` nats and its log-likelihood in the whole text is above
``beta``. Key tokens are kept as spans of characters, so that every model of a comparison is judged on the same ones,
whatever its tokenizer: its key tokens are those that lie inside a span. As in the authors' package ``longppl``, the
evaluator reads with its tokenizer's special tokens, and the models without. Log-likelihoods are computed in float32
from the model's logits, where the package computes them in the model's dtype: for bfloat16 models its LongPPL is 0.4 to
5 % away from the one here, for float32 models it is the same.

The SP-KV paper calls its validation text LongPPL; what it gives of it is the NLL of all tokens, and not this.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.base.errors import UserError
from spkv_nas.base.memory import AdaptiveBatchSize
from spkv_nas.data.sources import Document
from spkv_nas.model.config_section import gate_config
from spkv_nas.model.density_tracker import DensityTracker, layout_density
from spkv_nas.model.loss import token_nll

_TOGETHER = 1 << 12  # tokens of the short contexts that pass at once

Spans = list[tuple[int, int]]  # of characters, ascending


@dataclass(frozen=True)
class LongText:
    """A stretch of a document that is read at once. ``document`` is the document's number, of all."""

    document: int
    domain: str
    name: str
    text: str


@dataclass(frozen=True)
class Criterion:
    """Which tokens are key: contexts in the evaluator's tokens, thresholds in nats."""

    short: int
    stride: int
    alpha: float = 2.0
    beta: float = -2.0


@dataclass(frozen=True)
class Reading:
    """What a model makes of a text: sums of NLL over its predicted tokens and over the key ones.

    ``density`` is that of its keys, NaN of a model with neither gates nor a layout.
    """

    total: float
    num_tokens: int
    key_total: float
    num_keys: int
    density: float


def stretches(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, length: int, short: int, most: int | None
) -> list[LongText]:
    """Texts of at most ``length`` tokens that make up the documents, those of at most ``short`` left out.

    Args:
        most: tokens of all texts together; the last text ends there. None: read all.
    """
    found: list[LongText] = []
    seen = 0
    for number, document in enumerate(documents):
        if most is not None and most - seen <= short:
            break
        _, offsets = _encoded(tokenizer, document.text, special=False)
        for first in range(0, len(offsets), length):
            own = offsets[first : first + length]
            own = own if most is None else own[: most - seen]
            if len(own) > short:
                text = document.text[own[0][0] : own[-1][1]]
                found.append(LongText(number, document.domain, document.label, text))
                seen += len(own)
    return found


@torch.inference_mode()
def key_spans(evaluator: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, criterion: Criterion) -> Spans:
    """Where a text's key tokens are, those that follow each other as one span.

    Args:
        evaluator: as it is to read: in evaluation mode, its gates, if it has any, open.

    Raises:
        UserError: the tokenizer does not know where its tokens are, or an NLL is not finite.
    """
    ids, offsets = _encoded(tokenizer, text, special=True)
    if len(ids) <= criterion.short:
        return []
    whole = _losses(evaluator, ids[None])[0]
    short = _short_losses(evaluator, ids, criterion)
    whole = whole[criterion.short - 1 :]
    is_key = (short - whole > criterion.alpha) & (whole < -criterion.beta)
    return _merged(offsets[criterion.short + int(place)] for place in np.flatnonzero(is_key))


def _short_losses(evaluator: PreTrainedModel, ids: NDArray[np.int64], criterion: Criterion) -> NDArray[np.float64]:
    """NLL of the tokens from ``short`` on, each after the last ``short`` to ``short + stride`` tokens alone."""
    short, size = criterion.short, criterion.short + criterion.stride
    windows = [ids[start : start + size] for start in range(0, len(ids) - short, criterion.stride)]
    whole, rest = [one for one in windows if len(one) == size], [one for one in windows if len(one) < size]
    parts: list[NDArray[np.float64]] = []
    together, done = AdaptiveBatchSize(_TOGETHER // size), 0
    while done < len(whole):

        def attempt(number: int, done: int = done) -> NDArray[np.float64]:
            return _losses(evaluator, np.stack(whole[done : done + number]))

        found = together.run(attempt, len(whole) - done)
        parts += list(found)
        done += len(found)
    parts += [_losses(evaluator, one[None])[0] for one in rest]
    return np.concatenate([part[short - 1 :] for part in parts])


@torch.inference_mode()
def read(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, spans: Spans) -> Reading:
    """A text under a model, its gates, if it has any, as they are to be: hard.

    Raises:
        UserError: the tokenizer does not know where its tokens are, or an NLL is not finite.
    """
    ids, offsets = _encoded(tokenizer, text, special=False)
    watch = DensityTracker(model) if gate_config(model) is not None else None
    if watch is not None:
        watch.start()
    try:
        losses = _losses(model, ids[None])[0]
        heads = None if watch is None else watch.stop(alone=True)
    finally:
        if watch is not None:
            watch.close()
    key = key_tokens(offsets, spans)
    density = layout_density(model) if heads is None else float(np.nanmean(heads))
    return Reading(float(losses.sum()), len(losses), float(losses[key].sum()), len(key), density)


def key_tokens(offsets: Sequence[tuple[int, int]], spans: Spans) -> list[int]:
    """Which predicted tokens lie inside a span, counted from the second token of the text, the first predicted one."""
    starts = [start for start, _ in spans]
    found = []
    for number, (start, end) in enumerate(offsets[1:]):
        at = bisect_right(starts, start) - 1
        if at >= 0 and end <= spans[at][1]:
            found.append(number)
    return found


def _merged(offsets: Iterable[tuple[int, int]]) -> Spans:
    spans: Spans = []
    for start, end in offsets:
        if spans and spans[-1][1] == start:
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
    return spans


def _encoded(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool
) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """(tokens, the characters of each). Raises ``UserError``: the tokenizer does not know them."""
    try:
        found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    except NotImplementedError as error:
        raise UserError(
            f"{type(tokenizer).__name__} does not say which characters its tokens are, and LongPPL marks those\n"
            "it needs a model with a fast tokenizer"
        ) from error
    return np.array(found["input_ids"], dtype=np.int64), [tuple(pair) for pair in found["offset_mapping"]]


def _losses(model: PreTrainedModel, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """NLL of every token but a row's first, [B, T - 1]. Raises ``UserError``: one is not finite."""
    losses = token_nll(model, torch.from_numpy(ids).to(model.device)).cpu().double().numpy()
    if not np.isfinite(losses).all():
        raise UserError(
            "the NLL of a token is not a finite number\n"
            "the model's weights are damaged, or its activations overflow in its dtype: give --dtype float32"
        )
    return np.asarray(losses)
