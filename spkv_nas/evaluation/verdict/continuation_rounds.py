"""Measure how much of the dense model's own continuations a candidate predicts, a document per sample, in rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.base.arrays import Array
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.agreement import Line, predict, write_continuations
from spkv_nas.evaluation.verdict.rounds import Float, Prepared

_ROUND_PROMPTS = 16


def one_per_document(blocks: TokenBlocks, new_tokens: int) -> TokenBlocks:
    """Return the first block of each document, which is that of the last token of a block's prompt.

    Continuations of the same document are not independent, so each document gets one.
    """
    _, first = np.unique(blocks.document[:, blocks.block_size - new_tokens - 1], return_index=True)
    return replace(blocks, tokens=blocks.tokens[first], document=blocks.document[first], largest=None)


@dataclass(frozen=True)
class ContinuationRounds:
    """Scores in [0, 1] of continuations that the dense model writes; its own scores are 1.

    Greedy continuations: the share of tokens that equal the model's most probable ones. Sampled ones: the mean of
    min(1, q(x) / p(x)) over the tokens x, drawn from the dense model's distribution p, with the model's q. Its expected
    value is that of sum_x min(p, q), the share of tokens that speculative sampling accepts.

    Attributes:
        tokenizer: tokenizer of the models.
        blocks: one block per document, in random order; a block's beginning is continued.
        new_tokens: maximum number of tokens of a continuation.
        temperature: sampling temperature; 0 decodes greedily.
        seed: random seed of sampling.
        identity: identity of the text and the dense model, and of these numbers.
    """

    tokenizer: PreTrainedTokenizerBase
    blocks: TokenBlocks
    new_tokens: int
    temperature: float
    seed: int
    identity: str

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds, the last of which may be shorter."""
        return math.ceil(self.num_samples / _ROUND_PROMPTS)

    @property
    def num_samples(self) -> int:
        """Return the number of documents."""
        return self.blocks.num_blocks

    @property
    def prepared(self) -> tuple[Array, ...]:
        """Return the arrays of a round: continuations, padded with 0, and the dense model's predictions of them."""
        return (
            Array("tokens", "whole", "N T"),
            Array("predicted", "number", "N T", low=-math.inf),
            Array("length", "whole", "N", low=1),
        )

    def prepare(self, index: int, dense: PreTrainedModel) -> dict[str, NDArray[Any]]:
        """Continue the prompts of a round with the dense model, and predict the continuations with it."""
        blocks, first = self._round(index), index * _ROUND_PROMPTS
        lines = write_continuations(
            dense,
            self.tokenizer,
            blocks,
            self.new_tokens,
            temperature=self.temperature,
            seed=self.seed,
            first=first,
        )
        predicted = predict(dense, blocks, lines, self.new_tokens, temperature=self.temperature)
        # Pad the records to arrays, and keep their lengths
        length = [len(line["tokens"]) for line in lines]
        return {
            "tokens": _padded([line["tokens"] for line in lines]).astype(np.int64),
            "predicted": _padded([line["predicted"] for line in predicted]),
            "length": np.array(length, dtype=np.int64),
        }

    def measure(self, index: int, model: PreTrainedModel, prepared: Prepared) -> Float:
        """Return the score of each continuation of a round."""
        rows = list(zip(prepared["tokens"].tolist(), prepared["length"].tolist(), strict=True))
        lines: list[Line] = [{"block": block, "tokens": tokens[:length]} for block, (tokens, length) in enumerate(rows)]
        predicted = predict(model, self._round(index), lines, self.new_tokens, temperature=self.temperature)
        scores = []
        for line, dense in zip(predicted, prepared["predicted"], strict=True):
            values = np.array(line["predicted"])
            difference = values - dense[: len(values)]
            score = difference == 0 if self.temperature == 0 else np.exp(np.minimum(difference, 0.0))
            scores.append(score.mean())
        return np.array(scores, dtype=np.float64)

    def scores(self, measured: Sequence[Float]) -> Float:
        """Return the scores of all continuations."""
        scores: Float = np.concatenate([np.empty(0), *measured])
        return scores

    def _round(self, index: int) -> TokenBlocks:
        """Return the blocks of a round."""
        part = slice(index * _ROUND_PROMPTS, (index + 1) * _ROUND_PROMPTS)
        return replace(self.blocks, tokens=self.blocks.tokens[part], document=self.blocks.document[part], largest=None)


def _padded(rows: Sequence[Sequence[float]]) -> Float:
    """Return rows of unequal length as an array [N, T], padded with 0."""
    padded = np.zeros((len(rows), max(map(len, rows))))
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded
