"""Criteria ``agreement`` and ``acceptance``: continuations that the dense model writes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from spkv_nas.base.errors import UserError
from spkv_nas.evaluation.verdict.paired_test import MeanShortfall
from spkv_nas.stages.verdict.criterion import Criterion, Setting

if TYPE_CHECKING:
    from spkv_nas.evaluation.verdict.rounds import Rounds


def _continuations(temperature: float, setting: Setting) -> Rounds:
    """Return one continuation per document, which the dense model writes at a temperature; 0: greedily."""
    from spkv_nas.evaluation.verdict.continuation_rounds import ContinuationRounds, one_per_document
    from spkv_nas.model.checkpoint import checkpoint_hash

    options, length = setting.options, setting.blocks.block_size
    new_tokens = options.new_tokens or length // 2
    if new_tokens >= length:
        raise UserError(f"--new-tokens {new_tokens} leaves no prompt in a block of {length} tokens: give fewer")
    seed = f" seed {options.seed}" if temperature else ""
    identity = f"{setting.text_hash} {checkpoint_hash(options.model)} {new_tokens} temperature {temperature}{seed}"
    blocks = one_per_document(setting.blocks, new_tokens)
    return ContinuationRounds(setting.tokenizer, blocks, new_tokens, temperature, options.seed, identity)


AGREEMENT = Criterion("agreement", "documents", MeanShortfall(), partial(_continuations, 0.0))
ACCEPTANCE = Criterion("acceptance", "documents", MeanShortfall(), partial(_continuations, 1.0))
