"""Define the criterion ``nll``: the NLL of documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spkv_nas.evaluation.verdict.criterion import Criterion, Setting
from spkv_nas.evaluation.verdict.loss_tests import RelativeRise

if TYPE_CHECKING:
    from spkv_nas.evaluation.verdict.rounds import Rounds


@dataclass(frozen=True)
class DocumentNLLs(Criterion):
    """Rise of the NLL of documents."""

    name, help, title = "nll", "rise of the NLL in percent", "NLL by document"
    test = RelativeRise()

    def prepare(self, setting: Setting) -> Rounds:
        """Return the documents of the text, in rounds of blocks."""
        from spkv_nas.evaluation.micro_batch import fitting_batch
        from spkv_nas.evaluation.verdict.rounds import DocumentRounds

        return DocumentRounds(setting.blocks, setting.text_hash, fitting_batch(setting.dense, setting.blocks))


NLL = DocumentNLLs()
