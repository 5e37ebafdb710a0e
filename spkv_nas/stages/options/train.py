"""Declare the options of the ``train`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass

from spkv_nas.stages import flags
from spkv_nas.stages.options import InPrecision, Trains


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Trains, InPrecision):
    """Train a recipe's dense model and its SP-KV reference, and print the paths of both checkpoints.

    Interrupted training resumes when the same command is repeated.
    """

    recipe: flags.RecipeFile


def check(options: TrainOptions) -> None:
    """Check the files that the options name."""
    from spkv_nas.stages.checks import check_recipe

    check_recipe(options.recipe, options.dtype)
