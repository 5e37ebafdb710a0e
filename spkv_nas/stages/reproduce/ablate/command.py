"""Declare the ``reproduce ablate`` command: its options, their check, and its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.base.assets import EMBEDDED
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.progress import Reporter
from spkv_nas.stages.options import InPrecision, Trains
from spkv_nas.stages.result import Result

EMBEDDED_FILE = EMBEDDED / "ablations.yaml"
AblationsFile = Annotated[Path | None, Flag("Ablation file (YAML): name, recipe and rows.", argument=True)]


@dataclass(frozen=True, kw_only=True)
class AblateOptions(Trains, InPrecision):
    """Options of the ``reproduce ablate`` command."""

    file: AblationsFile = default(None, "the embedded ones")


def check(options: AblateOptions) -> None:
    """Check the files that every row's recipe names."""
    from spkv_nas.stages.checks import check_files
    from spkv_nas.training.ablation_plan import AblationPlan

    plan = AblationPlan.read(options.file or EMBEDDED_FILE, options.dtype)
    for recipe in plan.recipes.values():
        check_files(recipe, plan.base)


def ablate(options: AblateOptions, reporter: Reporter) -> Result:
    """Train variants of one recipe, by default the paper's ablations, and compare them with the first.

    A row changes values in a section of the recipe (gates: {window: 8}), or is {variant: full-attention} or
    {layout: FILE}; see "Recipes and training" in the documentation. Writes reports/NAME/ablations.csv. Runs resume
    where they stopped.
    """
    from spkv_nas.stages.reproduce.ablate import output, stage

    return Result(stage.ablate(options, reporter), output.ablations)
