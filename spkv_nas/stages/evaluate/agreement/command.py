"""Run the ``evaluate agreement`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.evaluate.agreement.options import AgreementOptions
from spkv_nas.stages.evaluate.evaluation import Evaluation
from spkv_nas.stages.result import Result


def agreement(options: AgreementOptions, reporter: Reporter) -> Result:
    """Measure how often a checkpoint's next tokens are a dense model's. Writes reports/NAME/token-agreement.csv.

    The dense model (--against) continues held-out text greedily and by sampling; both models then predict each of its
    tokens. Agreement is the share of equal greedy tokens. Acceptance is the share of tokens that speculative sampling
    would accept from the checkpoint as a draft model, and tokens per pass what a pass of the dense model would then
    yield. Continuations and values by token are kept in runs/NAME/agreement/ and reused.
    """
    from spkv_nas.stages.evaluate.agreement import stage

    return Result(stage.agreement(options, reporter), stage.show)


AGREEMENT = Evaluation("agreement", agreement, distributed=True)
