"""Declare the options of the ``evaluate agreement`` command, and check them; the class's docstring is the help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.artifacts.defaults import AGREEMENT_TOKENS, DRAFT_TOKENS
from spkv_nas.base.assets import EMBEDDED_PREFIX
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.evaluation.verdict.continuations import NewTokens
from spkv_nas.stages import flags
from spkv_nas.stages.evaluate.evaluation import CheckpointOptions, check_checkpoints
from spkv_nas.stages.options import DENSE, SubjectOptions

_MAX_DRAFT = 1024

DraftTokens = Annotated[
    str, Flag("Tokens drafted for each pass of the dense model, comma-separated.", metavar="N,N,...")
]


@dataclass(frozen=True, kw_only=True)
class AgreementOptions(CheckpointOptions, SubjectOptions):
    """Measure how often a checkpoint's next tokens are a dense model's. Writes reports/NAME/token-agreement.csv.

    The dense model (--against) continues held-out text greedily and by sampling; both models then predict each of its
    tokens. Agreement is the share of equal greedy tokens. Acceptance is the share of tokens that speculative sampling
    would accept from the checkpoint as a draft model, and tokens per pass what a pass of the dense model would then
    yield. Continuations and values by token are kept in runs/NAME/agreement/ and reused.
    """

    against: flags.Against = default(None, f"{DENSE} for embedded models")
    max_tokens: flags.OptionalMaxTokens = default(None, f"{AGREEMENT_TOKENS:,}")
    new_tokens: NewTokens = default(None, "half a block")
    temperature: flags.Temperature = 1.0
    draft_tokens: DraftTokens = DRAFT_TOKENS
    seed: flags.Seed = 0

    @property
    def dense(self) -> str:
        """Return the dense model. Raises ``UserError`` if it is not given."""
        if self.against is not None:
            return self.against
        if self.model.startswith(EMBEDDED_PREFIX):
            return DENSE
        raise UserError("evaluate agreement needs --against: the dense model to compare with")

    @property
    def drafts(self) -> list[int]:
        """Return the numbers of drafted tokens, ascending. Raises ``UserError`` if one is not a number in range."""
        try:
            numbers = sorted({int(part) for part in self.draft_tokens.split(",")})
        except ValueError:
            numbers = [0]
        if not 1 <= numbers[0] <= numbers[-1] <= _MAX_DRAFT:
            raise UserError(
                f"--draft-tokens '{self.draft_tokens[:40]}' is not a list of numbers from 1 to {_MAX_DRAFT}; "
                f"give for example {DRAFT_TOKENS}"
            )
        return numbers


def check(options: AgreementOptions) -> None:
    """Check the numbers of tokens, the threshold, the checkpoints and the text."""
    from spkv_nas.model.source import check_checkpoint
    from spkv_nas.stages.checkpoints import evaluated

    check_checkpoint(options.dense)
    assert options.drafts
    subject = evaluated(options)
    check_checkpoints(options)
    subject.check()
