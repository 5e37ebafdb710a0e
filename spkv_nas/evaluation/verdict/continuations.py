"""Define the criteria ``agreement`` and ``acceptance``: continuations that the dense model writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base import arrays, limits
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.evaluation.verdict import criterion, loss_tests, rounds

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from spkv_nas.data.blocks import TokenBlocks

NewTokens = Annotated[
    int | None,
    Flag("Maximum length of a continuation; the rest of a block is its prompt.", low=1, high=limits.MAX_BLOCK_SIZE),
]


@dataclass(frozen=True)
class Agreement(criterion.Criterion):
    """Share of tokens of the dense model's greedy continuations that a candidate does not predict."""

    name, title = "agreement", "Disagreement of greedy tokens"
    help = "greedy tokens that differ from the dense model's, in percentage points"
    test = loss_tests.MeanShortfall()
    temperature: ClassVar[float] = 0.0

    new_tokens: NewTokens = default(None, "half a block")

    def prepare(self, setting: criterion.Setting) -> rounds.Rounds:
        """Return one continuation per document, which the dense model writes; by default half a block."""
        length, temperature = setting.blocks.block_size, self.temperature
        new_tokens = self.new_tokens or length // 2
        if new_tokens >= length:
            raise UserError(f"new-tokens {new_tokens} leaves no prompt in a block of {length} tokens: give fewer")
        seed = f" seed {setting.seed}" if temperature else ""
        identity = f"{setting.text_hash} {setting.identity} {new_tokens} temperature {temperature}{seed}"
        blocks = one_per_document(setting.blocks, new_tokens)
        return ContinuationRounds(setting.tokenizer, blocks, new_tokens, temperature, setting.seed, identity)


@dataclass(frozen=True)
class Acceptance(Agreement):
    """Share of tokens that the dense model samples and that speculative sampling rejects of a candidate's draft."""

    name, title = "acceptance", "Rejection by speculative sampling"
    help = "sampled tokens that speculative sampling rejects, in percentage points"
    temperature = 1.0


def one_per_document(blocks: TokenBlocks, new_tokens: int) -> TokenBlocks:
    """Return the first block of each document, as continuations of the same document are not independent."""
    _, first = np.unique(blocks.document[:, blocks.block_size - new_tokens - 1], return_index=True)
    return replace(blocks, tokens=blocks.tokens[first], document=blocks.document[first], largest=None)


class ContinuationRounds(rounds.Rounds):
    """Scores in [0, 1] of continuations that the dense model writes; its own scores are 1.

    Greedy continuations: the share of tokens that equal the model's most probable ones. Sampled ones: the mean of
    min(1, q(x) / p(x)) over the tokens x, drawn from the dense model's distribution p, with the model's q. Its expected
    value is that of sum_x min(p, q), the share of tokens that speculative sampling accepts.
    """

    # Continuations, padded with 0, and the dense model's predictions of them
    prepared = (
        arrays.Array("tokens", "whole", "N T"),
        arrays.Array("predicted", "number", "N T", low=-math.inf),
        arrays.Array("length", "whole", "N", low=1),
    )

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        blocks: TokenBlocks,
        new_tokens: int,
        temperature: float,
        seed: int,
        identity: str,
    ) -> None:
        """Continue the beginning of each block, of which there is one per document, in random order."""
        self._tokenizer, self._blocks, self._new_tokens = tokenizer, blocks, new_tokens
        self._temperature, self._seed, self.identity = temperature, seed, identity
        self.num_samples = blocks.num_blocks

    def prepare(self, index: int, dense: PreTrainedModel) -> dict[str, NDArray[Any]]:
        """Continue the prompts of a round with the dense model, and predict the continuations with it."""
        from spkv_nas.evaluation.continuations import predict, write_continuations

        sampling: dict[str, Any] = {"temperature": self._temperature, "seed": self._seed, "first": index * self.size}
        blocks = self._round(index)
        lines = write_continuations(dense, self._tokenizer, blocks, self._new_tokens, **sampling)
        predicted = predict(dense, blocks, lines, self._new_tokens, temperature=self._temperature)
        # Pad the records to arrays, and keep their lengths
        return {
            "tokens": _padded([line["tokens"] for line in lines]).astype(np.int64),
            "predicted": _padded([line["predicted"] for line in predicted]),
            "length": np.array([len(line["tokens"]) for line in lines], dtype=np.int64),
        }

    def measure(self, index: int, model: PreTrainedModel, prepared: rounds.Prepared) -> rounds.Float:
        """Return the score of each continuation of a round."""
        from spkv_nas.evaluation.continuations import predict

        rows = zip(prepared["tokens"].tolist(), prepared["length"].tolist(), strict=True)
        lines = [{"block": block, "tokens": tokens[:length]} for block, (tokens, length) in enumerate(rows)]
        predicted = predict(model, self._round(index), lines, self._new_tokens, temperature=self._temperature)
        scores = []
        for line, dense in zip(predicted, prepared["predicted"], strict=True):
            values = np.array(line["predicted"])
            difference = values - dense[: len(values)]
            score = difference == 0 if self._temperature == 0 else np.exp(np.minimum(difference, 0.0))
            scores.append(score.mean())
        return np.array(scores, dtype=np.float64)

    def _round(self, index: int) -> TokenBlocks:
        """Return the blocks of a round."""
        tokens, document = self._blocks.tokens[self.part(index)], self._blocks.document[self.part(index)]
        return replace(self._blocks, tokens=tokens, document=document, largest=None)


def _padded(rows: Sequence[Sequence[float]]) -> rounds.Float:
    """Return rows of unequal length as an array [N, T], padded with 0."""
    padded = np.zeros((len(rows), max(map(len, rows))))
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


AGREEMENT, ACCEPTANCE = Agreement(), Acceptance()
