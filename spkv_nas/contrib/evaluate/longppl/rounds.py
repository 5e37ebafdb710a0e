"""Measure the NLL of LongPPL's key tokens by document, in rounds; the dense model selects them.

The text of a document is what blocks hold of it, each part read by itself. All models have the same tokenizer, so key
tokens are positions, not spans of characters as in ``evaluate longppl``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.base.arrays import Array
from spkv_nas.base.errors import UserError
from spkv_nas.contrib.evaluate.longppl.reading import Criterion, key_mask, sequence_nll
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.verdict.rounds import Float, Prepared
from spkv_nas.model.modes import evaluation_mode

_ROUND_DOCUMENTS = 16
_NO_KEYS = -1.0  # score of a document without key tokens


@dataclass(frozen=True)
class KeyTokenRounds:
    """NLL sums of the key tokens of documents, in rounds of documents; those without key tokens are left out.

    Attributes:
        blocks: text whose documents are in random order.
        criterion: criterion for key tokens.
        identity: identity of the text, the dense model and the criterion.
    """

    blocks: TokenBlocks
    criterion: Criterion
    identity: str

    def __post_init__(self) -> None:
        """Raise ``UserError`` if no part of a document is longer than the short context."""
        if not self._documents:
            raise UserError(
                f"no document has more than the short context of {self.criterion.short} tokens in a block\n"
                "use longer text, a larger --block-size, or a smaller short-context"
            )

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds, the last of which may be shorter."""
        return math.ceil(self.num_samples / _ROUND_DOCUMENTS)

    @property
    def num_samples(self) -> int:
        """Return the number of documents, including those that turn out to have no key tokens."""
        return len(self._documents)

    @property
    def prepared(self) -> tuple[Array, ...]:
        """Return the array of a round: 1 for key tokens, else 0, over all parts of its documents."""
        return (Array("is_key", "whole", "T", high=1),)

    def prepare(self, index: int, dense: PreTrainedModel) -> dict[str, NDArray[Any]]:
        """Select the key tokens of a round with the dense model."""
        opening = self.blocks.opening
        with evaluation_mode(dense):
            masks = [key_mask(dense, ids, self.criterion, opening) for parts in self._round(index) for ids in parts]
        return {"is_key": np.concatenate(masks).astype(np.int64)}

    def measure(self, index: int, model: PreTrainedModel, prepared: Prepared) -> Float:
        """Return the NLL sum of each document's key tokens; -1 without any."""
        is_key, position, sums = prepared["is_key"] > 0, 0, []
        with evaluation_mode(model):
            for parts in self._round(index):
                total, num_keys = 0.0, 0
                for ids in parts:
                    part = is_key[position : position + len(ids)]
                    position, num_keys = position + len(ids), num_keys + int(part.sum())
                    if part.any():  # the first token has no NLL, and is no key token
                        total += float(sequence_nll(model, ids[None], self.blocks.opening)[0][part[1:]].sum())
                sums.append(total if num_keys else _NO_KEYS)
        return np.array(sums, dtype=np.float64)

    def scores(self, measured: Sequence[Float]) -> Float:
        """Return the sums of all documents with key tokens."""
        scores: Float = np.concatenate([np.empty(0), *measured])
        with_keys: Float = scores[scores != _NO_KEYS]
        return with_keys

    @cached_property
    def _documents(self) -> list[list[NDArray[np.int64]]]:
        """Return the tokens of the parts of each document that are longer than the short context."""
        parts: dict[int, list[NDArray[np.int64]]] = {}
        for document, ids in _parts(self.blocks):
            if len(ids) > self.criterion.short:
                parts.setdefault(document, []).append(ids)
        return [parts[document] for document in sorted(parts)]

    def _round(self, index: int) -> list[list[NDArray[np.int64]]]:
        """Return the parts of a round's documents."""
        return self._documents[index * _ROUND_DOCUMENTS : (index + 1) * _ROUND_DOCUMENTS]


def _parts(blocks: TokenBlocks) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield (document, its tokens) of each stretch of a document in a block, without opening tokens."""
    first = len(blocks.opening)
    for tokens, document in zip(blocks.tokens[:, first:], blocks.document[:, first:], strict=True):
        starts = np.flatnonzero(np.diff(document)) + 1
        for ids, owner in zip(np.split(tokens, starts), np.split(document, starts), strict=True):
            yield int(owner[0]), ids.astype(np.int64)
