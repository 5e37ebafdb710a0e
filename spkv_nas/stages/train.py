"""Train a recipe's two models."""

from spkv_nas.base import console, progress
from spkv_nas.stages import commands, next_steps, reference_run
from spkv_nas.stages.options.train import TrainOptions


def train(options: TrainOptions, reporter: progress.Reporter = progress.SILENT) -> reference_run.Trained:
    """Train a recipe's dense model and its SP-KV branch, reusing finished runs."""
    return reference_run.train_reference(
        options.recipe, options.folders, device=options.device, dtype=options.dtype, reporter=reporter
    )


def show(result: reference_run.Trained) -> None:
    """Print the paths of a recipe's checkpoints."""
    console.say(f"dense checkpoint: {result.dense}\nSP-KV reference:  {result.reference}")


def run(options: TrainOptions, reporter: progress.Reporter) -> commands.Result:
    """Run the command."""
    return commands.Result(train(options, reporter), show, next=next_steps.after_train(options))
