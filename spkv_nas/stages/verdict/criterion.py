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
        text: blocks of the text, its documents in random order, on none of which a candidate was selected; None if
            no criterion reads text.
        reporter: receives messages.
    """

    options: VerdictOptions
    dense: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    text: TokenBlocks | None
    reporter: Reporter

    @property
    def blocks(self) -> TokenBlocks:
        """Return the text, for a criterion that reads it."""
        assert self.text is not None
        return self.text

    @cached_property
    def text_hash(self) -> str:
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
        reads_text: whether its samples are documents of the text (``--data``).
    """

    name: str
    noun: str
    test: PairedTest
    prepare: Callable[[Setting], Rounds]
    check: Callable[[VerdictOptions], None] = lambda _options: None
    reads_text: bool = True
