"""Train a recipe's two models."""

from spkv_nas.base import console, progress
from spkv_nas.stages import commands, reference_run
from spkv_nas.stages.options import probe, train


def run(options: train.TrainOptions, reporter: progress.Reporter) -> commands.Result:
    """Train a recipe's dense model and its SP-KV branch, reusing finished runs; suggest to probe the reference."""
    trained = reference_run.train_reference(
        options.recipe,
        options.folders,
        device=options.device,
        dtype=options.dtype,
        reporter=reporter,
    )
    following = probe.ProbeOptions(recipe=options.recipe, workspace=options.workspace)
    return commands.Result(trained, show, next=[commands.Suggestion.of(following)])


def show(result: reference_run.Trained) -> None:
    """Print the paths of a recipe's checkpoints."""
    console.say(f"dense checkpoint: {result.dense}\nSP-KV reference:  {result.reference}")
