"""Define the criterion ``nll``: the NLL of documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spkv_nas.evaluation.verdict import criterion, loss_tests, rounds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from spkv_nas.data.blocks import TokenBlocks


@dataclass(frozen=True)
class DocumentNLLs(criterion.Criterion):
    """Rise of the NLL of documents."""

    name, help, title = "nll", "rise of the NLL in percent", "NLL by document"
    test = loss_tests.RelativeRise()

    def prepare(self, setting: criterion.Setting) -> rounds.Rounds:
        """Return the documents of the text, in rounds of blocks."""
        from spkv_nas.evaluation.micro_batch import fitting_batch

        return DocumentRounds(setting.blocks, setting.text_hash, fitting_batch(setting.dense, setting.blocks))


class DocumentRounds(rounds.Rounds):
    """NLL sums of documents, in rounds of blocks; a document is a sample once its last block is measured."""

    def __init__(self, blocks: TokenBlocks, identity: str, batch_size: int) -> None:
        """Find the last block of each document of a text, whose documents are in random order (``in_random_order``)."""
        self.blocks, self.identity, self.batch_size = blocks, identity, batch_size
        # Documents with predicted tokens, and the last block of each, in the order of these blocks
        document = blocks.document[:, 1:]
        present, first = np.unique(document[::-1], return_index=True)
        last = blocks.num_blocks - 1 - first // document.shape[1]
        order = np.argsort(last, kind="stable")
        self._present, self._last = present[order].astype(np.intp), last[order]
        self.num_samples = len(present)

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds of blocks."""
        return -(-self.blocks.num_blocks // self.size)

    def _documents(self, index: int) -> NDArray[np.intp]:
        """Return the documents of a round."""
        return np.unique(self.blocks.document[self.part(index)]).astype(np.intp)

    def measure(self, index: int, model: PreTrainedModel, prepared: rounds.Prepared) -> rounds.Float:
        """Return the NLL sums of the documents of a round's blocks."""
        from spkv_nas.evaluation.nll import document_nll

        tokens, document = self.blocks.tokens[self.part(index)], self.blocks.document[self.part(index)]
        blocks = replace(self.blocks, tokens=tokens, document=document, largest=None)
        return document_nll(model, blocks, batch_size=self.batch_size).total[self._documents(index)]

    def scores(self, measured: Sequence[rounds.Float]) -> rounds.Float:
        """Return the NLL of every document whose last block has been measured."""
        totals = np.zeros(len(self.blocks.documents))
        for index, sums in enumerate(measured):
            totals[self._documents(index)] += sums
        is_complete = self._last < len(measured) * self.size
        return np.asarray(totals[self._present[is_complete]])


NLL = DocumentNLLs()
