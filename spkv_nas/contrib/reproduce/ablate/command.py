"""Run the ``reproduce ablate`` command; its docstring is the help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spkv_nas.base.progress import Reporter
from spkv_nas.contrib.reproduce.ablate.options import AblateOptions
from spkv_nas.stages.result import Result

if TYPE_CHECKING:
    from spkv_nas.training.run_plan import Plan


def ablate(options: AblateOptions, reporter: Reporter) -> Result:
    """Train variants of one recipe, by default the paper's ablations, and compare them with the first.

    A row changes values in a section of the recipe (gates: {window: 8}), or is {variant: full-attention} or
    {layout: FILE}, with {trained: false} without training; see "Recipes and training" in the documentation. Writes
    reports/NAME/ablations.csv. Runs resume where they stopped.
    """
    from spkv_nas.contrib.reproduce.ablate import stage

    return Result(stage.ablate(options, reporter), stage.ablations)


def plan(options: AblateOptions, reporter: Reporter) -> Plan:
    """Plan every row of the ablations file."""
    from spkv_nas.contrib.reproduce.ablate.plan import plan_ablations

    return plan_ablations(options, reporter)
