"""Declare the options of the ``train`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.stages import flags
from spkv_nas.stages.options import InPrecision, Trains


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Trains, InPrecision):
    """Options of the ``train`` command."""

    recipe: flags.RecipeFile


def check(options: TrainOptions) -> None:
    """Check the files that the options name."""
    from spkv_nas.stages.checks import check_recipe

    check_recipe(options.recipe, options.dtype)
