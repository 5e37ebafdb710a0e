"""Retrieval score: how much a head attends to the earlier copy of the token to be predicted.

After "Retrieval Head Mechanistically Explains Long-Context Factuality" (Wu et al., arXiv 2404.15574). A needle is a
sequence of random tokens, inserted into held-out text at a random depth and repeated at the end, so that any language
model can copy it without instructions. There are three differences from the paper:

- The repetition is given instead of generated, so every needle counts. ``copy_accuracy`` in the metadata is the share
  of needle tokens that the model predicts; the score means little where it is near 0.
- The score is the attention weight on the token to be copied next, not how often that weight is the largest, which is
  0 for most heads and would leave them tied.
- A KV head takes the score of its best query head, because a single query head is enough to copy. The query heads of
  later layers that read its keys count, too.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from spkv_nas.artifacts import head_scores, kinds
from spkv_nas.base import arrays, distributed, errors
from spkv_nas.base.progress import Progress
from spkv_nas.data import batches, tokenizer
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import attention, model_shape, windows
from spkv_nas.model.placement import input_device
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
) -> head_scores.HeadScores:
    """Measure the retrieval score of every KV head by domain, with one needle per block; must be called on all ranks.

    A needle has ``needle_length`` tokens m, of which m - 1 are to be predicted; the token to copy lies outside the
    window, and no needle is among the first ``sinks`` tokens. ``seed`` draws needles and depths. Raises ``UserError``
    if the blocks are too short, and warns if the model hardly copies.
    """
    # Insert a needle into every block
    hidden = needles(blocks, window, needle_length, seed, sinks)
    # Measure attention on the needles
    with windows.full_attention(model) as states:
        collected, num_correct = _measure(model, states, hidden, batch_size, progress)
    # Build the table
    heads = attention.heads_per_layer(states)
    accuracy = num_correct / (hidden.blocks.num_blocks * (needle_length - 1))
    if accuracy < _MIN_ACCURACY:
        warnings.warn(
            f"the model predicts only {accuracy:.1%} of the needle tokens: it hardly copies, so "
            "its retrieval scores are unreliable",
            stacklevel=3,
        )
    facts = {
        "needle_length": needle_length,
        "seed": seed,
        "copy_accuracy": round(accuracy, 4),
    }
    return signal_table(
        "retrieval",
        collected.means(_best_of_group(collected.sums.cpu().numpy(), heads)),
        window,
        passes=1.0,
        tokens=hidden.blocks.tokens.size,
        name=name,
        metadata={**(metadata or {}), **facts},
        unit=kinds.ATTENTION_UNIT,
        heads_per_layer=heads,
    )


def _measure(
    model: PreTrainedModel,
    states: Sequence[attention.LayerState],
    hidden: "Needles",
    batch_size: int,
    progress: Progress | None,
) -> tuple[HeadSums, float]:
    """Return (scores of query heads, number of needle tokens predicted), both summed over all ranks."""
    blocks = hidden.blocks
    needle_length = hidden.tokens.shape[1]
    device = input_device(model)
    # The last token has no next one to copy
    queries = slice(blocks.block_size - needle_length, blocks.block_size - 1)
    num_query_heads = model_shape.config_shape(model.config).num_heads
    most_readers = max(state.num_readers for state in states)
    collected = HeadSums(blocks, len(states), num_query_heads * (1 + most_readers), device)
    num_correct = np.zeros(1, dtype=np.int64)

    def run(start: int, text: Tensor) -> tuple[list[Tensor], int]:
        """Return (scores [B, G Hkv, m - 1] by layer, number of needle tokens predicted) of blocks."""
        token_array, depth_array = hidden.rows(start, len(text))
        tokens = torch.from_numpy(token_array).to(device)
        depth = torch.from_numpy(depth_array).to(device)
        # Observe the attention of each layer, and of those that read its keys
        scores: list[list[Tensor]] = [[] for _ in states]
        for state, layer_scores in zip(states, scores, strict=True):
            state.observer = _CopyObserver(layer_scores, state, depth, queries)
        decoded = model.get_decoder()(**blocks.boundaries.inputs(tokens), use_cache=False)
        # Count the needle tokens that the model predicts
        logits = model.get_output_embeddings()(decoded.last_hidden_state[:, queries])
        predicted = logits.argmax(-1).to(tokens.device)
        num_predicted = int((predicted == tokens[:, queries.start + 1 :]).sum())
        layers = [torch.cat([part.to(device) for part in parts], 1) for parts in scores]
        return layers, num_predicted

    def add(start: int, result: tuple[list[Tensor], int]) -> None:
        scores, num_predicted = result
        collected.add(start, scores, queries)
        num_correct[0] += num_predicted

    batches.run_own_batches(run, add, blocks, batch_size, device, progress)
    collected.add_up()
    return collected, float(distributed.sum_over_processes(num_correct)[0])


@dataclass(frozen=True)
class Needles:
    """Needles ``tokens`` int64 [N, m] that are hidden in N blocks of text at positions ``depth`` int64 [N]."""

    blocks: TokenBlocks
    tokens: arrays.Int
    depth: arrays.Int

    def rows(self, start: int, number: int) -> tuple[arrays.Int, arrays.Int]:
        """Return (blocks [number, T] from ``start`` on, with a needle inside and again at the end; its positions).

        The tokens are marked, as those of ``batches.block_tokens``.
        """
        part = slice(start, start + number)
        text_length = self.blocks.block_size - 2 * self.tokens.shape[1]
        rows = [
            np.concatenate([text[:at], needle, text[at:text_length], needle]).astype(np.int64)
            for text, needle, at in zip(
                self.blocks.marked(part), self.tokens[part], self.depth[part], strict=True
            )
        ]
        return np.stack(rows), self.depth[part]


def needles(
    blocks: TokenBlocks, window: int, needle_length: int, seed: int, sinks: int = 0
) -> Needles:
    """Draw a needle for each block of text, at a random depth, after the tokens that begin every text and ``sinks``.

    Its tokens are drawn from the other tokens of the text, without repetition. Needle and copy are in one document:
    where these are separate, in the longest, which becomes the last of the block; blocks in which it is too short are
    left out. Raises ``UserError`` if all are.
    """
    # Collect the distinct tokens of the text, without loading memory-mapped blocks all at once
    parts = (
        blocks.tokens[start : start + _READ_BLOCKS]
        for start in range(0, blocks.num_blocks, _READ_BLOCKS)
    )
    special = (*blocks.opening, *blocks.boundaries.separator)
    vocabulary = np.setdiff1d(reduce(np.union1d, parts, np.empty(0, dtype=np.int32)), special)
    # Keep the blocks into which a needle and its copy fit
    length = blocks.block_size
    rng = np.random.default_rng(seed)
    deepest = length - needle_length - max(needle_length, window + 1)
    first: int | arrays.Int = max(sinks, len(blocks.opening))
    if isinstance(blocks.boundaries, tokenizer.SeparateDocuments):
        blocks, start = _longest_last(blocks)
        fits = start + first <= deepest
        blocks = blocks.part(np.flatnonzero(fits))
        first = (start + first)[fits]
    if (
        needle_length < 2
        or not blocks.num_blocks
        or np.min(first) > deepest
        or len(vocabulary) < needle_length
    ):
        raise errors.UserError(
            f"blocks of {length} tokens with {len(vocabulary)} distinct tokens cannot hold a "
            f"needle of {needle_length} tokens and its copy more than a window of {window} keys "
            "later\n"
            "give a smaller --window, or a larger --context"
        )
    depth = rng.integers(first, deepest + 1, size=blocks.num_blocks)
    tokens = [
        rng.choice(vocabulary, needle_length, replace=False) for _ in range(blocks.num_blocks)
    ]
    return Needles(blocks, np.stack(tokens).astype(np.int64), depth)


def _longest_last(blocks: TokenBlocks) -> tuple[TokenBlocks, arrays.Int]:
    """Move the longest of the separate documents of each block to its end; also return where it starts [N].

    What separates documents is written before it, over tokens of other documents. Where these are too few, the start is
    the block size, where no needle fits.
    """
    position = blocks.boundaries.positions(blocks.marked())
    longest = position.max(1) + 1
    end = position.argmax(1) + 1
    columns = np.arange(blocks.block_size)
    is_longest = (columns < end[:, None]) & (columns >= (end - longest)[:, None])
    order = np.argsort(is_longest, axis=1, kind="stable")
    tokens = np.take_along_axis(blocks.tokens, order, 1)
    document = np.take_along_axis(blocks.document, order, 1)
    begins = None if blocks.begins is None else np.take_along_axis(blocks.begins, order, 1)
    start = blocks.block_size - longest
    # Separate it from what now comes before it
    separator = blocks.boundaries.separator
    ending = separator[: len(separator) - len(blocks.opening)]
    for number, first in enumerate(start):
        if first >= len(ending):
            tokens[number, first - len(ending) : first] = ending
            if begins is not None:
                begins[number, first - len(ending) : first] = False
    start[(start > 0) & (start < len(ending))] = blocks.block_size
    return replace(blocks, tokens=tokens, document=document, begins=begins), start


@dataclass
class _CopyObserver(attention.Observer):
    """Observer that appends scores [B, G Hkv, m - 1] of a layer, or its reader, to ``scores``."""

    sees_readers = True
    knows_documents = True

    scores: list[Tensor]
    state: attention.LayerState
    source: Tensor  # where needles begin, int64 [B]
    query_positions: slice  # of the copy of the needle

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None,
        starts: Tensor | None = None,
    ) -> None:
        """Compute the scores of a pass."""
        state = self.state
        # Compute the attention of the queries in the copy
        chunks = attention_weights(
            q,
            k,
            scale,
            window=state.checkpoint_window,
            start=self.query_positions.start,
            sink_logits=sink_logits,
            starts=starts,
            softcap=state.softcap,
        )
        num_keys = q.shape[2]
        parts = [pad(weights, (0, num_keys - weights.shape[-1])) for _, weights in chunks]
        rows = torch.cat(parts, -2).flatten(1, 2)[:, :, :-1]  # [B, Hq, m - 1, T]
        # Attention weight on the token after the current one's first occurrence
        needle = torch.arange(rows.shape[2], device=q.device)
        copied = self.source.to(q.device)[:, None] + 1 + needle
        index = copied[:, None, :, None].expand(-1, rows.shape[1], -1, -1)
        weights = rows.gather(-1, index)[..., 0]
        # Order the query heads by their number in the group, then by KV head
        grouped = weights.view(len(weights), state.num_kv_heads, -1, weights.shape[2])
        weights = grouped.transpose(1, 2).flatten(1, 2)
        self.scores.append(torch.zeros_like(weights) if state.is_always_local else weights)


def _best_of_group(sums: arrays.Float, heads_per_layer: Sequence[int]) -> arrays.Float:
    """Select each KV head's query head with the highest total: [L, G Hkv, documents] -> [L, Hkv, documents]."""
    selected = np.zeros((len(sums), max(heads_per_layer), sums.shape[2]))
    for layer, number in enumerate(heads_per_layer):
        grouped = sums[layer].reshape(-1, number, sums.shape[2])
        best = grouped.sum(-1).argmax(0)
        selected[layer, :number] = grouped[best, np.arange(number)]
    return selected
