"""Train a recipe's two models."""

from spkv_nas.base import console, progress
from spkv_nas.stages import commands, next_steps, reference_run
from spkv_nas.stages.options.train import TrainOptions


def run(options: TrainOptions, reporter: progress.Reporter) -> commands.Result:
    """Train a recipe's dense model and its SP-KV branch, reusing finished runs."""
    trained = reference_run.train_reference(
        options.recipe, options.folders, device=options.device, dtype=options.dtype, reporter=reporter
    )
    return commands.Result(trained, show, next=next_steps.after_train(options))


def show(result: reference_run.Trained) -> None:
    """Print the paths of a recipe's checkpoints."""
    console.say(f"dense checkpoint: {result.dense}\nSP-KV reference:  {result.reference}")
