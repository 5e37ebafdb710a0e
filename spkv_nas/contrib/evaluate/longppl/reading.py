"""LongPPL (arXiv 2410.23771): perplexity of the tokens that only a long context makes likely.

An evaluator model reads each text twice: whole, and with only ``short`` to ``short + stride`` tokens before each token.
A token is a key token if its log-likelihood is more than ``alpha`` nats lower in the short context, and above ``beta``
in the whole text. Key tokens are stored as spans of characters, so that every model of a comparison is evaluated on the
same ones, whatever its tokenizer: its key tokens are those that lie inside a span.

Two things differ from the authors' package ``longppl``. Every sequence, short contexts included, begins with the tokens
that the tokenizer puts before a text, such as BOS; the package gives them to the evaluator's whole text only.
Log-likelihoods are computed in float32 from the model's logits; the package computes them in the model's dtype, which
changes the LongPPL of bfloat16 models by 0.4 to 5 %.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.base import errors, memory, special_tokens
from spkv_nas.base.arrays import Array, Float, Int, Mask
from spkv_nas.contrib.evaluate.longppl.options import SHORT_CONTEXT
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.sources import Document
from spkv_nas.evaluation.verdict import criterion
from spkv_nas.model import config_section, density_tracker, loss, model_shape, modes
from spkv_nas.model.placement import input_device

# In nats, as of the LongPPL authors
LONGPPL_ALPHA = 2.0
LONGPPL_BETA = -2.0
_TOGETHER = 1 << 12  # tokens of short contexts per batch
_PART = 4  # default ratio of text to short context, and of short context to stride

Spans = list[tuple[int, int]]  # (start, end) of characters, ascending


@dataclass(frozen=True)
class LongText:
    """A stretch of a document that is read in one pass; ``document`` is the document's index."""

    document: int
    domain: str
    name: str
    text: str


@dataclass(frozen=True)
class Criterion:
    """Criterion for the key tokens of LongPPL: tokens of the short context, and how many tokens share one.

    The whole text must gain ``alpha`` nats of log-likelihood over the short context, and reach ``beta``.
    """

    short: int
    stride: int
    alpha: float = LONGPPL_ALPHA
    beta: float = LONGPPL_BETA

    @classmethod
    def of(cls, length: int, short: int | None = None) -> "Criterion":
        """Return the criterion for texts of at most ``length`` tokens, by default with a quarter for the short context.

        Raises ``UserError`` if the short context leaves nothing of a text.
        """
        short = short or max(1, min(SHORT_CONTEXT, length // _PART))
        if short >= length:
            raise errors.UserError(
                f"the short context ({short} tokens) must be shorter than a text ({length} "
                "tokens)\n"
                "use a smaller --short-context or a larger --context"
            )
        return cls(short, max(1, short // _PART), LONGPPL_ALPHA, LONGPPL_BETA)


@dataclass(frozen=True)
class Reading:
    """LongPPL sums of a model on one text: the NLL of predicted tokens and of key tokens, and the numbers of both.

    The density of the attention keys is NaN for a model with neither gates nor a layout.
    """

    total: float
    num_tokens: int
    key_total: float
    num_keys: int
    density: float


def stretches(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    short: int,
    most: int | None,
) -> list[LongText]:
    """Cut the documents into texts of at most ``length`` tokens, leaving out those of at most ``short``.

    The length is that of the text encoded by itself, with the tokens that the tokenizer puts before it. No text ends
    within a character, whose tokens may be several. The last text ends after ``most`` tokens of all texts, if given.
    """
    texts: list[LongText] = []
    num_seen = 0
    length -= len(special_tokens.tokens_before(tokenizer))
    for number, document in enumerate(documents):
        start = 0
        ends = _ends(tokenizer, document.text)
        while start < len(document.text):
            # Stop at the total number of tokens
            limit = length if most is None else min(length, most - num_seen)
            if limit <= short:
                return texts
            # Cut off the longest text that fits
            end, num_tokens = _longest(tokenizer, document.text, ends, start, limit)
            if num_tokens > short:
                text = document.text[start:end]
                texts.append(LongText(number, document.domain, document.label, text))
                num_seen += num_tokens
            start = end
    return texts


def _ends(tokenizer: PreTrainedTokenizerBase, text: str) -> Int:
    """Return where a text may end, between two tokens that are not of the same character, ascending.

    [2, N]: index of the character after each end, the last after the text, and the tokens before it.
    """
    _, offsets = _encoded(tokenizer, text)
    starts, stops = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    stops = np.maximum.accumulate(stops)
    # Tokens after which one of another character begins
    last = np.flatnonzero(starts[1:] >= stops[:-1])
    positions = [*stops[last], len(text)]
    num_tokens = [*(last + 1), len(stops)]
    return np.array([positions, num_tokens])


def _longest(
    tokenizer: PreTrainedTokenizerBase, text: str, ends: Int, start: int, limit: int
) -> tuple[int, int]:
    """Return the end of the longest text from ``start`` on of at most ``limit`` tokens, and its number of tokens.

    The number is 0 for a first character of more tokens, after which the text then ends.
    """
    # Guess the end from the tokens of the whole document
    positions, counts = ends
    first = int(np.searchsorted(positions, start, "right"))
    most = limit + (int(counts[first - 1]) if first else 0)
    while True:
        index = max(first, int(np.searchsorted(counts, most, "right")) - 1)
        end = int(positions[index])
        # Encoded by itself, a text may have other tokens at its ends
        num_tokens = len(_encoded(tokenizer, text[start:end])[0])
        if num_tokens <= limit or index == first:
            return end, num_tokens if num_tokens <= limit else 0
        most = int(counts[index]) - (num_tokens - limit)


@torch.inference_mode()
def key_spans(
    evaluator: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, criterion: Criterion
) -> Spans:
    """Find the key tokens of a text as spans of characters, merging adjacent ones, with an evaluator of open gates."""
    ids, offsets = _encoded(tokenizer, text)
    is_key = key_mask(evaluator, ids, criterion, special_tokens.tokens_before(tokenizer))
    # Merge adjacent tokens, and those of the same character
    spans: Spans = []
    for index in np.flatnonzero(is_key):
        start, end = offsets[index]
        last_start, last_end = spans[-1] if spans else (-1, -1)
        if last_end >= start:
            spans[-1] = (last_start, max(last_end, end))
        else:
            spans.append((start, end))
    return spans


@torch.inference_mode()
def key_mask(
    evaluator: PreTrainedModel, ids: Int, criterion: Criterion, opening: tuple[int, ...]
) -> Mask:
    """Return which tokens of ``ids`` [T] are key tokens, bool [T], where every sequence begins with ``opening``."""
    is_key = np.zeros(len(ids), dtype=np.bool_)
    if len(ids) <= criterion.short:
        return is_key
    # Compare the NLL in the whole text with that in the short context
    whole = sequence_nll(evaluator, ids[None], opening)[0, criterion.short - 1 :]
    short = _short_losses(evaluator, ids, criterion, opening)
    gains = short - whole
    is_key[criterion.short :] = (gains > criterion.alpha) & (whole < -criterion.beta)
    return is_key


def _short_losses(
    evaluator: PreTrainedModel, ids: Int, criterion: Criterion, opening: tuple[int, ...]
) -> Float:
    """Compute the NLL of the tokens from ``short`` on, each after ``short`` to ``short + stride`` tokens of context."""
    # Cut overlapping windows, of which the last may be shorter
    short = criterion.short
    size = criterion.short + criterion.stride
    windows = [ids[start : start + size] for start in range(0, len(ids) - short, criterion.stride)]
    full_windows = [window for window in windows if len(window) == size]
    last_windows = [window for window in windows if len(window) < size]

    # Read the windows of full size in batches that fit in memory, and the last ones singly
    def run(part: range) -> list[Float]:
        batch = np.stack(full_windows[part.start : part.stop])
        return list(sequence_nll(evaluator, batch, opening))

    parts = memory.AdaptiveBatchSize(_TOGETHER // size).run_all(run, range(len(full_windows)))
    parts += [sequence_nll(evaluator, window[None], opening)[0] for window in last_windows]
    return np.concatenate([part[short - 1 :] for part in parts])


@torch.inference_mode()
def read(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, spans: Spans
) -> Reading:
    """Evaluate a model, whose gates the caller sets, on a text and the spans of its key tokens."""
    ids, offsets = _encoded(tokenizer, text)
    # Compute the losses, counting kept keys if there are gates
    with closing(density_tracker.DensityTracker(model)) as watch:
        if config_section.gate_config(model) is not None:
            watch.start()
        losses = sequence_nll(model, ids[None], special_tokens.tokens_before(tokenizer))[0]
        head_densities = watch.stop(alone=True)
    # Select the key tokens
    key = key_tokens(offsets, spans)
    kept = None if head_densities is None else float(np.nanmean(head_densities))
    return Reading(
        total=float(losses.sum()),
        num_tokens=len(losses),
        key_total=float(losses[key].sum()),
        num_keys=len(key),
        density=density_tracker.layout_density(model) if kept is None else kept,
    )


def key_tokens(offsets: Sequence[tuple[int, int]], spans: Spans) -> list[int]:
    """Return the indices of predicted tokens inside a span, counted from the second token, the first predicted one."""
    # A token before all spans is inside none
    starts, ends = np.array([(-1, -1), *spans]).T
    token_starts, token_ends = np.array(offsets[1:], dtype=np.int64).reshape(-1, 2).T
    # Look up the last span that begins at each token or before
    last_span = np.searchsorted(starts, token_starts, "right") - 1
    is_inside = token_ends <= ends[last_span]
    indices: list[int] = np.flatnonzero(is_inside).tolist()
    return indices


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[Int, list[tuple[int, int]]]:
    """Return (tokens, the characters of each), without special tokens; ``UserError`` for a slow tokenizer."""
    try:
        encoding = special_tokens.encode_text(text, tokenizer, return_offsets_mapping=True)
    except NotImplementedError as error:
        raise errors.UserError(
            "LongPPL needs the position of each token in the text, which "
            f"{type(tokenizer).__name__} does not provide\n"
            "use a model with a fast tokenizer"
        ) from error
    ids = np.array(encoding["input_ids"], dtype=np.int64)
    offsets = [(start, end) for start, end in encoding["offset_mapping"]]
    return ids, offsets


@torch.inference_mode()
def sequence_nll(model: PreTrainedModel, ids: Int, opening: tuple[int, ...]) -> Float:
    """Compute the finite NLL [B, T - 1] of every token of ``ids`` [B, T] but the first, after ``opening``."""
    openings = np.tile(np.array(opening, np.int64), (len(ids), 1))
    sequences = np.concatenate([openings, ids], axis=1)
    model_shape.check_length(model, sequences.shape[1], "give a smaller --context", warns=False)
    nll = loss.token_nll(model, torch.from_numpy(sequences).to(input_device(model)))
    losses = nll.cpu().double().numpy()[:, len(opening) :]
    if not np.isfinite(losses).all():
        raise errors.UserError(
            "the NLL of a token is not a finite number\n"
            "the model's weights are damaged, or its activations overflow in its dtype: give "
            "--dtype float32"
        )
    return np.asarray(losses)


class KeyTokenRounds(criterion.Rounds):
    """NLL sums of the key tokens of documents, in rounds of documents; those without key tokens are left out."""

    # 1 for key tokens, else 0, over all parts of the documents of a round
    prepared = (Array("is_key", "whole", "T", high=1),)

    def __init__(self, blocks: TokenBlocks, key: Criterion, identity: str) -> None:
        """Collect the parts of each document that are longer than the short context; ``UserError`` without any."""
        self.identity = identity
        self._key = key
        self._opening = blocks.opening
        parts: dict[int, list[Int]] = {}
        for document, ids in _parts(blocks):
            if len(ids) > key.short:
                parts.setdefault(document, []).append(ids)
        if not parts:
            raise errors.UserError(
                f"no document has more than the short context of {key.short} tokens in a block\n"
                "use longer text, a larger --context, or a smaller short-context"
            )
        self._documents = [parts[document] for document in sorted(parts)]
        # Including those that turn out to have no key tokens
        self.num_samples = len(self._documents)

    def prepare(self, index: int, dense: PreTrainedModel) -> dict[str, NDArray[Any]]:
        """Select the key tokens of a round with the dense model."""
        masks = []
        with modes.evaluation_mode(dense):
            for parts in self._documents[self.part(index)]:
                masks += [key_mask(dense, ids, self._key, self._opening) for ids in parts]
        return {"is_key": np.concatenate(masks).astype(np.int64)}

    def measure(
        self, index: int, model: PreTrainedModel, prepared: criterion.Prepared
    ) -> criterion.Float:
        """Return the NLL sum of each document's key tokens; ``NO_SCORE`` without any."""
        documents = self._documents[self.part(index)]
        ends = np.cumsum([len(ids) for parts in documents for ids in parts])
        masks = iter(np.split(prepared["is_key"] > 0, ends))
        sums = []
        with modes.evaluation_mode(model):
            for parts in documents:
                part_sums = []
                for ids in parts:
                    # A first token is not predicted, and none of the key tokens
                    mask = next(masks)[1:]
                    if mask.any():
                        losses = sequence_nll(model, ids[None], self._opening)[0]
                        part_sums.append(float(losses[mask].sum()))
                sums.append(sum(part_sums) if part_sums else criterion.NO_SCORE)
        return np.array(sums, dtype=np.float64)


def _parts(blocks: TokenBlocks) -> Iterator[tuple[int, Int]]:
    """Yield (document, its tokens) of each stretch of a document in a block, without opening tokens and filling."""
    first = len(blocks.opening)
    begins = blocks.begins_text()[:, first:]
    for tokens, document, is_begun in zip(
        blocks.tokens[:, first:], blocks.document[:, first:], begins, strict=True
    ):
        starts = np.flatnonzero(np.diff(document)) + 1
        for part in np.split(np.arange(len(tokens)), starts):
            # The part ends with what ends its text
            end = int(np.flatnonzero(~is_begun[part]).max(initial=-1)) + 1
            yield int(document[part[0]]), tokens[part][:end].astype(np.int64)
