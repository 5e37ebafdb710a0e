"""Declare ``evaluate nll``: its options, their check, and its help."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.evaluate.evaluation import Evaluation
from spkv_nas.stages.evaluate.options import CheckpointOptions, check_checkpoints
from spkv_nas.stages.options import SubjectOptions
from spkv_nas.stages.result import Result


@dataclass(frozen=True, kw_only=True)
class NLLOptions(CheckpointOptions, SubjectOptions):
    """Options of the ``evaluate nll`` command."""


def check(options: NLLOptions) -> None:
    """Check the threshold, the checkpoints and the text."""
    from spkv_nas.stages.evaluate.checkpoints import evaluated

    subject = evaluated(options)
    check_checkpoints(options)
    subject.check()


def nll(options: NLLOptions, reporter: Reporter) -> Result:
    """Measure a checkpoint's NLL on held-out text, optionally against another checkpoint.

    The checkpoint may be dense, a hybrid, or have gates. Without --data, the text is the held-out standard library text
    of the embedded models. With --against, the difference between both checkpoints is paired by document and written
    to reports/NAME/evaluation.csv. The tokens of --data are kept in runs/NAME/blocks/.
    """
    from spkv_nas.stages.evaluate.nll import output, stage

    return Result(stage.nll(options, reporter), output.show, output.document)


NLL = Evaluation("nll", nll, distributed=True)
