"""Describe a criterion of a verdict: an entry of ``CRITERIA``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from spkv_nas.base.progress import Reporter
from spkv_nas.evaluation.verdict.paired_test import PairedTest
from spkv_nas.stages.verdict.options import VerdictOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from spkv_nas.data.blocks import TokenBlocks
    from spkv_nas.evaluation.verdict.rounds import Rounds


@dataclass(frozen=True)
class Setting:
    """What every candidate of a verdict is measured with.

    Attributes:
        options: options of the command.
        dense: the model to keep up with.
        tokenizer: tokenizer of all models.
        blocks: text with its documents in random order; no document chose a candidate.
        reporter: receives messages.
    """

    options: VerdictOptions
    dense: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    blocks: TokenBlocks
    reporter: Reporter

    @cached_property
    def text(self) -> str:
        """Return the identity of the text: a hash of its tokens and their documents."""
        key = hashlib.sha256(str(self.blocks.tokens.shape).encode())
        for array in (self.blocks.tokens, self.blocks.document):
            key.update(np.ascontiguousarray(array).data)
        return key.hexdigest()


@dataclass(frozen=True)
class Criterion:
    """Criterion by which candidates are compared with the dense model, sample by sample.

    Attributes:
        name: name in ``--margin``.
        noun: what a sample is, in the plural.
        test: paired test of its scores.
        prepare: returns the samples, in rounds.
        check: checks its options before anything is loaded.
    """

    name: str
    noun: str
    test: PairedTest
    prepare: Callable[[Setting], Rounds]
    check: Callable[[VerdictOptions], None] = lambda _options: None
