"""Declare the options of the ``evaluate nll`` command, and check them; the class's docstring is the help."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.stages.evaluate.evaluation import CheckpointOptions, check_checkpoints
from spkv_nas.stages.options import SubjectOptions


@dataclass(frozen=True, kw_only=True)
class NLLOptions(CheckpointOptions, SubjectOptions):
    """Measure a checkpoint's NLL on held-out text, optionally against another checkpoint.

    The checkpoint may be dense, a hybrid, or have gates. Without --data, the text is the held-out standard library text
    of the embedded models. With --against, the difference between both checkpoints is paired by document and written
    to reports/NAME/evaluation.csv. The tokens of --data are kept in runs/NAME/blocks/.
    """


def check(options: NLLOptions) -> None:
    """Check the threshold, the checkpoints and the text."""
    from spkv_nas.stages.checkpoints import evaluated

    subject = evaluated(options)
    check_checkpoints(options)
    subject.check()
