"""Declare the options of the ``train-hybrid`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.stages import flags
from spkv_nas.stages.options import InPrecision, RetrainsLayouts

Reference = Annotated[
    bool, Flag("Also retrain the SP-KV reference, with its gates.", ("--reference/--no-reference",))
]


@dataclass(frozen=True, kw_only=True)
class TrainHybridOptions(RetrainsLayouts, InPrecision):
    """Retrain layouts, full attention and SP-KV from one dense checkpoint. Writes reports/NAME/comparison.csv.

    Runs resume where they stopped, and finished runs are reused: repeat the same command. The paths of the retrained
    checkpoints are printed and written to reports/NAME/checkpoints.csv, for spkv-nas export.
    """

    layouts: flags.OptionalLayoutFiles = default(None, "all of layouts/NAME/")
    seeds: flags.Seeds = default(1, note="Each has a different data order.")
    reference: Reference = True


def check(options: TrainHybridOptions) -> None:
    """Check the probe, the layouts and the recipe."""
    from spkv_nas.stages import checks, lookup

    table = lookup.chosen_table(options)
    lookup.find_proposal(options.folders, table.name, options.layouts)
    checks.check_recipe(lookup.chosen_recipe(options, table, "demo.yaml"), options.dtype)
