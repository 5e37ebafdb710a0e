"""Run the ``train`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.result import Result
from spkv_nas.stages.train.options import TrainOptions


def train(options: TrainOptions, reporter: Reporter) -> Result:
    """Train a recipe's dense model and its SP-KV reference, and print the paths of both checkpoints.

    Interrupted training resumes when the same command is repeated.
    """
    from spkv_nas.stages.next_steps import after_train
    from spkv_nas.stages.train import stage

    return Result(stage.train(options, reporter), stage.show, next=after_train(options))
