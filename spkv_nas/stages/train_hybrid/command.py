"""Declare the ``train-hybrid`` command: its options, their check, and its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.base.progress import Reporter
from spkv_nas.stages import flags
from spkv_nas.stages.options import EMBEDDED_RECIPE, ONLY_PROBE, InPrecision, Trains
from spkv_nas.stages.result import Result

Reference = Annotated[bool, Flag("Also retrain the SP-KV reference, with its gates.", ("--reference/--no-reference",))]


@dataclass(frozen=True, kw_only=True)
class TrainHybridOptions(Trains, InPrecision):
    """Options of the ``train-hybrid`` command."""

    layouts: flags.OptionalLayoutFiles = default(None, "all of layouts/NAME/")
    recipe: flags.RecipeOption = default(None, EMBEDDED_RECIPE, note="Its dense model is retrained.")
    probe: flags.OptionalProbe = default(None, ONLY_PROBE)
    seeds: flags.Seeds = default(1, note="Each has a different data order.")
    reference: Reference = True


def check(options: TrainHybridOptions) -> None:
    """Check the probe, the layouts and the recipe."""
    from spkv_nas.stages.checks import check_recipe
    from spkv_nas.stages.chosen import chosen_recipe, chosen_table
    from spkv_nas.stages.lookup import find_proposal

    table = chosen_table(options)
    find_proposal(options.folders, table.name, options.layouts)
    check_recipe(chosen_recipe(options, table, "demo.yaml"), options.dtype)


def train_hybrid(options: TrainHybridOptions, reporter: Reporter) -> Result:
    """Retrain layouts, full attention and SP-KV from one dense checkpoint. Writes reports/NAME/comparison.csv.

    Runs resume where they stopped, and finished runs are reused: repeat the same command. The paths of the retrained
    checkpoints are printed and written to reports/NAME/checkpoints.csv, for spkv-nas export.
    """
    from spkv_nas.stages.next_steps import after_training_hybrids
    from spkv_nas.stages.train_hybrid import output, stage

    comparison = stage.train_hybrid(options, reporter)
    return Result(
        comparison,
        output.show,
        output.document,
        next=after_training_hybrids(options, comparison.folder.name),
    )
