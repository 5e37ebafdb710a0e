"""Run the ``train-hybrid`` command, whose docstring is the help, and check its options."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.result import Result
from spkv_nas.stages.train_hybrid.options import TrainHybridOptions


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
    from spkv_nas.stages.train_hybrid import stage

    comparison = stage.train_hybrid(options, reporter)
    return Result(
        comparison,
        stage.show,
        stage.document,
        next=() if comparison.alarm else after_training_hybrids(options, comparison.folder.name),
    )
