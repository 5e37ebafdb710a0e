"""Declare the options of the ``evaluate nll`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.stages.evaluate.options import CheckpointOptions, check_checkpoints
from spkv_nas.stages.options import SubjectOptions


@dataclass(frozen=True, kw_only=True)
class NLLOptions(CheckpointOptions, SubjectOptions):
    """Options of the ``evaluate nll`` command."""


def check(options: NLLOptions) -> None:
    """Check the threshold, the checkpoints and the text."""
    from spkv_nas.stages.evaluate.checkpoints import evaluated

    subject = evaluated(options)
    check_checkpoints(options)
    subject.check()
