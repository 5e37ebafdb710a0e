"""Declare the options of the ``reproduce ablate`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.base import assets, flag
from spkv_nas.stages.options import InPrecision, Trains

EMBEDDED_FILE = assets.EMBEDDED / "ablations.yaml"
AblationsFile = Annotated[
    Path | None, flag.Flag("Ablation file (YAML): name, recipe and rows.", argument=True)
]


@dataclass(frozen=True, kw_only=True)
class AblateOptions(Trains, InPrecision):
    """Train variants of one recipe, by default the paper's ablations, and compare them with the first.

    A row changes values in a section of the recipe (gates: {window: 8}), or is {variant: full-attention} or
    {layout: FILE}, with {trained: false} without training; see "Recipes and training" in the documentation. Writes
    reports/NAME/ablations.csv. Runs resume where they stopped.
    """

    file: AblationsFile = flag.default(None, "the embedded ones")


def check(options: AblateOptions) -> None:
    """Check the files that every row's recipe names."""
    from spkv_nas.contrib.reproduce.ablate.ablation_plan import AblationPlan
    from spkv_nas.stages.checks import check_files

    plan = AblationPlan.read(options.file or EMBEDDED_FILE, options.dtype)
    for recipe in plan.recipes.values():
        check_files(recipe, plan.base)
