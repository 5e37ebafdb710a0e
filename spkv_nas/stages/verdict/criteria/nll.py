"""Criterion ``nll``: the NLL of documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spkv_nas.evaluation.verdict.paired_test import RelativeRise
from spkv_nas.stages.verdict.criterion import Criterion, Setting

if TYPE_CHECKING:
    from spkv_nas.evaluation.verdict.rounds import Rounds


def _documents(setting: Setting) -> Rounds:
    """Return the documents of the text, in rounds of blocks."""
    from spkv_nas.evaluation.micro_batch import fitting_batch
    from spkv_nas.evaluation.verdict.rounds import DocumentRounds

    return DocumentRounds(setting.blocks, setting.text_hash, fitting_batch(setting.dense, setting.blocks))


NLL = Criterion("nll", "documents", RelativeRise(), _documents)
