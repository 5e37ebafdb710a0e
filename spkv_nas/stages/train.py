"""Train a recipe's two models."""

from __future__ import annotations

from spkv_nas.base.console import say
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.stages.next_steps import after_train
from spkv_nas.stages.options.train import TrainOptions
from spkv_nas.stages.reference_run import Trained, train_reference
from spkv_nas.stages.result import Result


def train(options: TrainOptions, reporter: Reporter = SILENT) -> Trained:
    """Train a recipe's dense model and its SP-KV branch, reusing finished runs."""
    return train_reference(
        options.recipe, options.folders, device=options.device, dtype=options.dtype, reporter=reporter
    )


def show(result: Trained) -> None:
    """Print the paths of a recipe's checkpoints."""
    say(f"dense checkpoint: {result.dense}\nSP-KV reference:  {result.reference}")


def run(options: TrainOptions, reporter: Reporter) -> Result:
    """Run the command."""
    return Result(train(options, reporter), show, next=after_train(options))
