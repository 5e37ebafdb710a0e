"""Declare the ``train`` command: its options, their check, and its help."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.base.progress import Reporter
from spkv_nas.stages import flags
from spkv_nas.stages.options import InPrecision, Trains
from spkv_nas.stages.result import Result


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Trains, InPrecision):
    """Options of the ``train`` command."""

    recipe: flags.RecipeFile


def check(options: TrainOptions) -> None:
    """Check the files that the options name."""
    from spkv_nas.stages.checks import check_recipe

    check_recipe(options.recipe, options.dtype)


def train(options: TrainOptions, reporter: Reporter) -> Result:
    """Train a recipe's dense model and its SP-KV reference, and print the paths of both checkpoints.

    Interrupted training resumes when the same command is repeated.
    """
    from spkv_nas.stages.next_steps import after_train
    from spkv_nas.stages.train import output, stage

    return Result(stage.train(options, reporter), output.show, next=after_train(options))
