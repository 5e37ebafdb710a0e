"""Declare the options of the ``evaluate agreement`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass

from spkv_nas.base import assets, errors, flag
from spkv_nas.evaluation.verdict.criteria import NewTokens
from spkv_nas.stages import commands, flags
from spkv_nas.stages.options import DENSE, CheckpointOptions, SubjectOptions

TOKENS = 16_384  # of prompts and continuations by default


@dataclass(frozen=True, kw_only=True)
class AgreementOptions(CheckpointOptions, SubjectOptions):
    """Measure how often a checkpoint's next tokens are a dense model's. Writes reports/NAME/token-agreement.csv.

    The dense model (--against) continues held-out text greedily and by sampling at temperature 1; both models then
    predict each of its tokens. Agreement is the share of equal greedy tokens. Acceptance is the share of tokens that
    speculative sampling would accept from the checkpoint as a draft model, and tokens per pass what a pass of the dense
    model would then yield. Continuations and values by token are kept in runs/NAME/agreement/ and reused.
    """

    against: flags.Against = flag.default(None, f"{DENSE} for embedded models")
    max_tokens: flags.OptionalMaxTokens = flag.default(None, f"{TOKENS:,}")
    new_tokens: NewTokens = flag.default(None, "half a block")
    seed: flags.Seed = 0

    @property
    def dense(self) -> str:
        """Return the dense model. Raises ``UserError`` if it is not given."""
        if self.against is not None:
            return self.against
        if self.model.startswith(assets.EMBEDDED_PREFIX):
            return DENSE
        raise errors.UserError(
            "evaluate agreement needs --against: the dense model to compare with"
        )


def check(options: AgreementOptions) -> None:
    """Check the dense model and the text."""
    from spkv_nas.model.source import check_checkpoint
    from spkv_nas.stages.subject import Subject

    check_checkpoint(options.dense)
    Subject.evaluated(options).check()


AGREEMENT = commands.Command("agreement", commands.runner(AgreementOptions), distributed=True)
