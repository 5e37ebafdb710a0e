"""Measure the samples of a criterion in rounds, in a random order that is the same for every model.

A round is the unit that is stored: an interrupted verdict resumes after the last finished one, and gives the same
answer. So rounds must not depend on the machine. Where samples depend on the dense model, such as continuations that it
writes, it prepares each round once for all candidates, and that is stored too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.base.arrays import Array
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import document_nll

Float = NDArray[np.float64]
Prepared = Mapping[str, NDArray[Any]]  # arrays of a round that the dense model prepared, by name
_ROUND_BLOCKS = 16  # blocks of text per round


class Rounds(Protocol):
    """Samples of a criterion, in rounds.

    Attributes:
        identity: text of everything that the samples depend on besides the model.
        num_rounds: number of rounds.
        num_samples: number of samples in all rounds.
        prepared: arrays that the dense model prepares for each round; empty if it prepares none.
    """

    @property
    def identity(self) -> str:
        """Return ``identity``."""

    @property
    def num_rounds(self) -> int:
        """Return ``num_rounds``."""

    @property
    def num_samples(self) -> int:
        """Return ``num_samples``."""

    @property
    def prepared(self) -> tuple[Array, ...]:
        """Return ``prepared``."""

    def prepare(self, index: int, dense: PreTrainedModel) -> dict[str, NDArray[Any]]:
        """Return the arrays ``prepared`` of a round; called only if there are any."""

    def measure(self, index: int, model: PreTrainedModel, prepared: Prepared) -> Float:
        """Measure a round: finite numbers, at least one."""

    def scores(self, measured: Sequence[Float]) -> Float:
        """Return one score per sample that the first rounds, measured in order, complete."""


class Unprepared:
    """Base of rounds that the dense model does not prepare."""

    prepared: tuple[Array, ...] = ()

    def prepare(self, index: int, dense: PreTrainedModel) -> dict[str, NDArray[Any]]:
        """Return no arrays."""
        return {}


@dataclass(frozen=True)
class DocumentRounds(Unprepared):
    """NLL sums of documents, in rounds of blocks.

    Attributes:
        blocks: text whose documents are in random order (``TokenBlocks.in_random_order``). A document is a sample once
            its last block is measured.
        identity: identity of the text.
        batch_size: blocks per forward pass.
    """

    blocks: TokenBlocks
    identity: str
    batch_size: int

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds, the last of which may be shorter."""
        return -(-self.blocks.num_blocks // _ROUND_BLOCKS)

    @cached_property
    def _last_blocks(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the documents with predicted tokens and the last block of each, in the order of these blocks."""
        document = self.blocks.document[:, 1:]
        present, first = np.unique(document[::-1], return_index=True)
        last = self.blocks.num_blocks - 1 - first // document.shape[1]
        order = np.argsort(last, kind="stable")
        return present[order].astype(np.intp), last[order]

    @property
    def num_samples(self) -> int:
        """Return the number of documents with predicted tokens."""
        return len(self._last_blocks[0])

    def _documents(self, index: int) -> NDArray[np.intp]:
        """Return the documents of a round."""
        return np.unique(self.blocks.document[index * _ROUND_BLOCKS : (index + 1) * _ROUND_BLOCKS]).astype(np.intp)

    def measure(self, index: int, model: PreTrainedModel, prepared: Prepared) -> Float:
        """Return the NLL sums of the documents of a round's blocks."""
        part = slice(index * _ROUND_BLOCKS, (index + 1) * _ROUND_BLOCKS)
        tokens, document = self.blocks.tokens[part], self.blocks.document[part]
        blocks = replace(self.blocks, tokens=tokens, document=document, largest=None)
        nll = document_nll(model, blocks, batch_size=self.batch_size)
        return nll.total[self._documents(index)]

    def scores(self, measured: Sequence[Float]) -> Float:
        """Return the NLL of every document whose last block has been measured."""
        totals = np.zeros(len(self.blocks.documents))
        for index, sums in enumerate(measured):
            totals[self._documents(index)] += sums
        present, last = self._last_blocks
        return totals[present[last < len(measured) * _ROUND_BLOCKS]]
