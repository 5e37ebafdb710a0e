"""Criteria ``agreement`` and ``acceptance``: continuations that the dense model writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_BLOCK_SIZE
from spkv_nas.evaluation.verdict.criterion import Criterion, Setting
from spkv_nas.evaluation.verdict.loss_tests import MeanShortfall

if TYPE_CHECKING:
    from spkv_nas.evaluation.verdict.rounds import Rounds

NewTokens = Annotated[
    int | None,
    Flag("Maximum length of a continuation; the rest of a block is its prompt.", low=1, high=MAX_BLOCK_SIZE),
]


@dataclass(frozen=True)
class Agreement(Criterion):
    """Share of tokens of the dense model's greedy continuations that a candidate does not predict."""

    name, title = "agreement", "Disagreement of greedy tokens"
    help = "greedy tokens that differ from the dense model's, in percentage points"
    test = MeanShortfall()
    temperature: ClassVar[float] = 0.0

    new_tokens: NewTokens = default(None, "half a block")

    def prepare(self, setting: Setting) -> Rounds:
        """Return one continuation per document, which the dense model writes; by default half a block."""
        from spkv_nas.evaluation.verdict.continuation_rounds import ContinuationRounds, one_per_document

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


AGREEMENT, ACCEPTANCE = Agreement(), Acceptance()
