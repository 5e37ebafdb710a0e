"""Retrieval score: how much a head looks back at the token that is to be copied.

After "Retrieval Head Mechanistically Explains Long-Context Factuality" (Wu et al., arXiv 2404.15574), which counts how
often a head's most attended token is the needle's token that the model generates, over the generations that contain the
needle. Here a needle is a string of random tokens, put into held-out text at a random depth and repeated at its end: a
copy that any language model may make, without instructions. Three things differ: the repetition is given, not
generated, so every needle counts (``copy_accuracy`` in the metadata says how many of its tokens the model predicts;
near 0 the score says little); the score is the attention on the token to be copied next, not how often that is the
largest, which is 0 for most heads and would leave them tied; the KV head takes the score of its best query head,
because copying is the doing of one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.distributed import sum_over_processes
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.attention import LayerState
from spkv_nas.model.model_shape import config_shape
from spkv_nas.model.windows import full_attention
from spkv_nas.probing.heads import HeadSums, attention_weights, signal_table

_COPIES = 0.1  # share of the needles' tokens predicted below which the score is warned about
_LOOKED_AT = 1024  # blocks at once


@torch.inference_mode()
def retrieval(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int,
    *,
    needle_length: int = 16,
    batch_size: int = 8,
    seed: int = 0,
    name: str = "retrieval",
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> HeadScores:
    """The retrieval score of every KV head, by domain: one needle per block of text. Collective.

    Args:
        blocks: the text around the needles.
        window: what is to be copied lies outside this many recent keys.
        needle_length: m, tokens of a needle; m - 1 of them are asked for.
        seed: of needles and depths.
        progress: called with (blocks done, in all) of this process.

    Raises:
        UserError: the blocks are too short for needle, window and repetition, or the model cannot be hooked.

    Warns:
        UserWarning: the model hardly copies.
    """
    tokens, depth = needles(blocks, window, needle_length, seed)
    rows = _Rows(tokens)
    asked = slice(blocks.block_size - needle_length, blocks.block_size - 1)  # queries; the last has nothing to copy
    right = np.zeros(1, dtype=np.int64)
    with full_attention(model) as states:
        head = model.get_output_embeddings()
        collected = HeadSums(blocks, len(states), config_shape(model.config).num_heads, model.device)

        def run(start: int, text: Tensor) -> tuple[list[Tensor], int]:
            batch = torch.from_numpy(np.stack(rows.take(start, len(text)))).to(model.device)
            source = torch.from_numpy(depth[start : start + len(text)]).to(model.device)
            scores: list[Tensor] = []  # [B, Hq, m - 1] by layer
            for state in states:
                state.observer = _observer(scores, state, source, asked)
            hidden = model.get_decoder()(input_ids=batch, use_cache=False).last_hidden_state[:, asked]
            predicted = head(hidden).argmax(-1).to(batch.device)
            return scores, int((predicted == batch[:, asked.start + 1 :]).sum())

        def add(start: int, found: tuple[list[Tensor], int]) -> None:
            scores, number = found
            right[0] += number
            collected.count(start, start + len(scores[0]), asked)
            for layer, values in enumerate(scores):
                collected.add(layer, values)

        run_own_batches(run, add, blocks, batch_size, model.device, progress)
    collected.add_up()
    sums = _best_of_group(collected.sums.cpu().numpy(), states[0].num_kv_heads)
    accuracy = _accuracy(right, blocks.num_blocks * (needle_length - 1))
    facts = {**(metadata or {}), "needle_length": needle_length, "seed": seed, "copy_accuracy": round(accuracy, 4)}
    return signal_table(
        "retrieval", collected.means(sums), window, passes=1.0, tokens=blocks.tokens.size, name=name, metadata=facts
    )


def needles(
    blocks: TokenBlocks, window: int, needle_length: int, seed: int
) -> tuple[Iterator[NDArray[np.int64]], NDArray[np.int64]]:
    """(N times int64 [T] of text with a needle at a random depth and again at the end, int64 [N] depth of the first).

    A needle's tokens are drawn from those of the text, without repetition. Raises ``UserError`` for short blocks.
    """
    length, rng = blocks.block_size, np.random.default_rng(seed)
    deepest = length - needle_length - max(needle_length, window + 1)
    vocabulary = _vocabulary(blocks)
    if needle_length < 2 or deepest < 0 or len(vocabulary) < needle_length:
        raise UserError(
            f"blocks of {length} tokens, {len(vocabulary)} of them distinct, cannot hold a needle of {needle_length} "
            f"tokens and its repetition, outside a window of {window} keys\n"
            "give a smaller --window, or a larger --block-size"
        )
    depth = rng.integers(deepest + 1, size=blocks.num_blocks)

    def rows() -> Iterator[NDArray[np.int64]]:
        rest = length - 2 * needle_length
        for text, at in zip(blocks.tokens, depth, strict=True):
            needle = rng.choice(vocabulary, needle_length, replace=False)
            yield np.concatenate([text[:at], needle, text[at:rest], needle]).astype(np.int64)

    return rows(), depth


def _accuracy(right: NDArray[np.int64], asked: int) -> float:
    """Share of the needles' tokens that the model predicts; warns where it is small. Collective."""
    accuracy = float(sum_over_processes(right)[0]) / asked
    if accuracy < _COPIES:
        warnings.warn(
            f"the model predicts {accuracy:.1%} of the needles' tokens: it hardly copies, so these scores say little",
            stacklevel=4,
        )
    return accuracy


class _Rows:
    """Rows that are drawn one after the other, by their numbers."""

    def __init__(self, rows: Iterator[NDArray[np.int64]]) -> None:
        self._rest = enumerate(rows)
        self._drawn: dict[int, NDArray[np.int64]] = {}

    def take(self, start: int, number: int) -> list[NDArray[np.int64]]:
        """So many rows from ``start`` on; those before are not asked for again."""
        for earlier in [one for one in self._drawn if one < start]:
            del self._drawn[earlier]
        wanted = range(start, start + number)
        while wanted[-1] not in self._drawn:
            next_one, row = next(self._rest)
            if next_one >= start:
                self._drawn[next_one] = row
        return [self._drawn[one] for one in wanted]


def _vocabulary(blocks: TokenBlocks) -> NDArray[np.int32]:
    """The tokens of the text, ascending; blocks that are a map of a file are not all in memory at once."""
    parts = (blocks.tokens[start : start + _LOOKED_AT] for start in range(0, blocks.num_blocks, _LOOKED_AT))
    return reduce(np.union1d, parts, np.empty(0, dtype=np.int32))


def _observer(scores: list[Tensor], state: LayerState, source: Tensor, asked: slice) -> Any:
    def observe(q: Tensor, k: Tensor, _v: Tensor, scale: float) -> None:
        parts = [w for _, w in attention_weights(q, k, scale, window=state.own_window, start=asked.start)]
        rows = torch.cat([torch.nn.functional.pad(w, (0, q.shape[2] - w.shape[-1])) for w in parts], -2)
        rows = rows.flatten(1, 2)[:, :, :-1]  # [B, Hq, m - 1, T]
        copied = source.to(q.device)[:, None] + 1 + torch.arange(rows.shape[2], device=q.device)
        index = copied[:, None, :, None].expand(-1, rows.shape[1], -1, -1)
        scores.append(rows.gather(-1, index)[..., 0])

    return observe


def _best_of_group(sums: NDArray[np.float64], num_kv_heads: int) -> NDArray[np.float64]:
    """[L, Hkv, documents] of the query head of highest total in each group, from [L, Hq, documents]."""
    grouped = sums.reshape(sums.shape[0], num_kv_heads, -1, sums.shape[2])
    best = grouped.sum(-1).argmax(-1)[:, :, None, None]
    return np.take_along_axis(grouped, best, axis=2)[:, :, 0]
