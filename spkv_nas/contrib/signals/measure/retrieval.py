"""Retrieval score: how much a head attends to the earlier copy of the token to be predicted.

After "Retrieval Head Mechanistically Explains Long-Context Factuality" (Wu et al., arXiv 2404.15574), which counts how
often a head's most attended token is the needle token being generated, over the generations that contain the needle.
Here, a needle is a sequence of random tokens, inserted into held-out text at a random depth and repeated at the end, so
that any language model can copy it without instructions. There are three differences:

- The repetition is given instead of generated, so every needle counts. ``copy_accuracy`` in the metadata is the share
  of needle tokens that the model predicts; the score means little where it is near 0.
- The score is the attention weight on the token to be copied next, not how often that weight is the largest, which is
  0 for most heads and would leave them tied.
- A KV head takes the score of its best query head, because a single query head is enough to copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.kinds import ATTENTION_UNIT
from spkv_nas.base.distributed import sum_over_processes
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.attention import LayerState
from spkv_nas.model.model_shape import config_shape
from spkv_nas.model.windows import full_attention
from spkv_nas.probing.heads import HeadSums, attention_weights, signal_table

_MIN_ACCURACY = 0.1  # share of needle tokens predicted below which to warn
_READ_BLOCKS = 1024  # blocks read at once when collecting the vocabulary


@torch.inference_mode()
def retrieval(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int,
    *,
    sinks: int = 0,
    needle_length: int = 16,
    batch_size: int = 8,
    seed: int = 0,
    name: str = "retrieval",
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> HeadScores:
    """Measure the retrieval score of every KV head by domain, with one needle per block; must be called on all ranks.

    Args:
        model: any supported decoder with an LM head.
        blocks: text around the needles.
        window: number of recent keys a local head sees; the token to copy always lies outside.
        sinks: number of first tokens a local head sees as well; no needle is among them.
        needle_length: m, tokens per needle, of which m - 1 are to be predicted.
        batch_size: blocks per forward pass.
        seed: seed of the needles and their depths.
        name: name of the table.
        metadata: provenance of the model and the text.
        progress: called with (blocks done, total) of this rank.

    Raises:
        UserError: the blocks are too short for needle, window and repetition, or the model cannot be hooked.

    Warns:
        UserWarning: the model hardly copies.
    """
    # Insert a needle into every block
    tokens, depth = needles(blocks, window, needle_length, seed, sinks)
    rows = _Rows(tokens)
    length = blocks.block_size
    query_positions = slice(length - needle_length, length - 1)  # the last token has no successor to copy

    # Measure attention on the needles
    with full_attention(model) as states:
        run = partial(_run, model, states, rows, depth, query_positions)
        collected = HeadSums(blocks, len(states), config_shape(model.config).num_heads, model.device)
        num_correct = _collect(run, collected, blocks, query_positions, batch_size, model.device, progress)
    collected.add_up()

    # Build the table
    sums = _best_of_group(collected.sums.cpu().numpy(), states[0].num_kv_heads)
    accuracy = _accuracy(num_correct, blocks.num_blocks * (needle_length - 1))
    options = {"needle_length": needle_length, "seed": seed, "copy_accuracy": round(accuracy, 4)}
    table_metadata, size = {**(metadata or {}), **options}, blocks.tokens.size
    means = collected.means(sums)
    return signal_table(
        "retrieval", means, window, unit=ATTENTION_UNIT, passes=1.0, tokens=size, name=name, metadata=table_metadata
    )


def _collect(
    run: Callable[[int, Tensor], tuple[list[Tensor], int]],
    collected: HeadSums,
    blocks: TokenBlocks,
    query_positions: slice,
    batch_size: int,
    device: torch.device,
    progress: Progress | None,
) -> NDArray[np.int64]:
    """Add the scores of this rank's batches to ``collected``, and return the number of tokens predicted, int64 [1]."""
    num_correct = np.zeros(1, dtype=np.int64)

    def add(start: int, result: tuple[list[Tensor], int]) -> None:
        scores, correct = result
        num_correct[0] += correct
        collected.add(start, scores, query_positions)

    run_own_batches(run, add, blocks, batch_size, device, progress)
    return num_correct


def _run(
    model: PreTrainedModel,
    states: Sequence[LayerState],
    rows: _Rows,
    depth: NDArray[np.int64],
    query_positions: slice,
    start: int,
    text: Tensor,
) -> tuple[list[Tensor], int]:
    """Run the rows of a batch of blocks, whose ``text`` [B, T] gives only their number.

    Returns:
        (scores by layer [B, Hq, m - 1], number of needle tokens predicted).
    """
    batch = torch.from_numpy(np.stack(rows.take(start, len(text)))).to(model.device)
    source = torch.from_numpy(depth[start : start + len(text)]).to(model.device)
    # Attention on the needles
    scores: list[Tensor] = []  # [B, Hq, m - 1] by layer
    for state in states:
        state.observer = _observer(scores, state, source, query_positions)
    hidden = model.get_decoder()(input_ids=batch, use_cache=False).last_hidden_state[:, query_positions]
    # Predictions of the needles' tokens
    predicted = model.get_output_embeddings()(hidden).argmax(-1).to(batch.device)
    return scores, int((predicted == batch[:, query_positions.start + 1 :]).sum())


def needles(
    blocks: TokenBlocks, window: int, needle_length: int, seed: int, sinks: int = 0
) -> tuple[Iterator[NDArray[np.int64]], NDArray[np.int64]]:
    """Insert a needle into each block of text at a random depth and again at the end.

    A needle's tokens are drawn from the tokens of the text, without repetition and without those that begin every
    block, which also stay first.

    Args:
        blocks: N blocks of T tokens.
        window: number of recent keys a local head sees; the token to copy always lies outside.
        needle_length: tokens per needle.
        seed: seed of the needles and their depths.
        sinks: number of first tokens that a local head sees as well, which needles leave as they are.

    Returns:
        (iterator over N rows int64 [T], int64 [N] position of each row's first needle).

    Raises:
        UserError: the blocks are too short, or have too few distinct tokens.
    """
    # Collect the distinct tokens of the text, without loading memory-mapped blocks all at once
    parts = (blocks.tokens[start : start + _READ_BLOCKS] for start in range(0, blocks.num_blocks, _READ_BLOCKS))
    vocabulary = np.setdiff1d(reduce(np.union1d, parts, np.empty(0, dtype=np.int32)), blocks.opening)
    # Check that a needle and its copy fit into a block
    length, rng = blocks.block_size, np.random.default_rng(seed)
    deepest = length - needle_length - max(needle_length, window + 1)
    first = max(sinks, len(blocks.opening))
    if needle_length < 2 or deepest < first or len(vocabulary) < needle_length:
        raise UserError(
            f"blocks of {length} tokens with {len(vocabulary)} distinct tokens cannot hold a needle of {needle_length} "
            f"tokens and its copy more than a window of {window} keys later\n"
            "give a smaller --window, or a larger --block-size"
        )
    depth = rng.integers(first, deepest + 1, size=blocks.num_blocks)

    def rows() -> Iterator[NDArray[np.int64]]:
        text_length = length - 2 * needle_length
        for text, at in zip(blocks.tokens, depth, strict=True):
            needle = rng.choice(vocabulary, needle_length, replace=False)
            yield np.concatenate([text[:at], needle, text[at:text_length], needle]).astype(np.int64)

    return rows(), depth


def _accuracy(num_correct: NDArray[np.int64], num_tokens: int) -> float:
    """Return the share of needle tokens predicted, and warn if it is small; must be called on all ranks."""
    accuracy = float(sum_over_processes(num_correct)[0]) / num_tokens
    if accuracy < _MIN_ACCURACY:
        warnings.warn(
            f"the model predicts only {accuracy:.1%} of the needle tokens: it hardly copies, so its retrieval scores "
            "are unreliable",
            stacklevel=4,
        )
    return accuracy


class _Rows:
    """Random access, by ascending index, to rows that are generated one after the other."""

    def __init__(self, rows: Iterator[NDArray[np.int64]]) -> None:
        """Read rows from the iterator as they are needed."""
        self._rest = enumerate(rows)
        self._drawn: dict[int, NDArray[np.int64]] = {}

    def take(self, start: int, number: int) -> list[NDArray[np.int64]]:
        """Return ``number`` rows from index ``start``, and drop the earlier ones."""
        for index in [index for index in self._drawn if index < start]:
            del self._drawn[index]
        indices = range(start, start + number)
        while indices[-1] not in self._drawn:
            index, row = next(self._rest)
            if index >= start:
                self._drawn[index] = row
        return [self._drawn[index] for index in indices]


def _observer(scores: list[Tensor], state: LayerState, source: Tensor, query_positions: slice) -> Any:
    """Return an attention observer that appends one layer's scores [B, Hq, m - 1] to ``scores``.

    Args:
        scores: list to append to.
        state: the layer.
        source: int64 [B], position of each row's first needle.
        query_positions: positions of the m - 1 queries.
    """

    def observe(q: Tensor, k: Tensor, _v: Tensor, scale: float, sink_logits: Tensor | None) -> None:
        # Compute the attention of the queries in the copy
        shown: Any = {"window": state.checkpoint_window, "start": query_positions.start, "sink_logits": sink_logits}
        parts = [weights for _, weights in attention_weights(q, k, scale, **shown)]
        rows = torch.cat([torch.nn.functional.pad(w, (0, q.shape[2] - w.shape[-1])) for w in parts], -2)
        rows = rows.flatten(1, 2)[:, :, :-1]  # [B, Hq, m - 1, T]
        # Attention weight on the token after the current one's first occurrence
        copied = source.to(q.device)[:, None] + 1 + torch.arange(rows.shape[2], device=q.device)
        index = copied[:, None, :, None].expand(-1, rows.shape[1], -1, -1)
        weights = rows.gather(-1, index)[..., 0]
        scores.append(torch.zeros_like(weights) if state.is_always_local else weights)

    return observe


def _best_of_group(sums: NDArray[np.float64], num_kv_heads: int) -> NDArray[np.float64]:
    """Select the query head with the highest total in each group: [L, Hq, documents] -> [L, Hkv, documents]."""
    grouped = sums.reshape(sums.shape[0], num_kv_heads, -1, sums.shape[2])
    best = grouped.sum(-1).argmax(-1)[:, :, None, None]
    return np.take_along_axis(grouped, best, axis=2)[:, :, 0]
