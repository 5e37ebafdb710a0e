"""Retrain layouts of a search for the smallest memory, on the half of the text that selects: a step of ``auto``."""

from dataclasses import replace

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base import progress, units
from spkv_nas.evaluation.verdict.critical_budget import first_by_costs
from spkv_nas.probing.window_choice import half_of
from spkv_nas.stages.critical_budget import BudgetResult
from spkv_nas.stages.options.auto import AutoOptions
from spkv_nas.stages.subject import Subject
from spkv_nas.training import retraining

RECOVERED = (2.0, 4.0, 8.0)  # layouts are retrained that lose up to these multiples of the margin by their costs


def retrain(options: AutoOptions, table: HeadScores, search: BudgetResult, reporter: progress.Reporter) -> list[str]:
    """Retrain the smallest layouts whose costs are below some multiples of the margin; return checkpoints, ascending.

    Only the costs of windows choose them, so that the documents of the verdict do not. None is retrained if a layout
    that is not larger passes without. Raises ``UserError``: as ``retraining.retrain``.
    """
    # Choose layouts by their costs
    margins, nll = search.compared.trial.margins, table.metadata.get("nll")
    middle = len(search.layouts) // 2
    found = {first_by_costs(margins, search.layouts, nll, factor) for factor in RECOVERED}
    chosen = sorted({middle if position is None else position for position in found})
    passes = search.critical.passes
    if passes is not None and passes <= chosen[0]:
        reporter.announce("nothing is retrained: no smaller layout is likely to pass")
        return []
    # Write them under names with their sizes, so that what selected them is known
    layouts = []
    for position in chosen:
        layout = search.layouts[position]
        layouts.append(replace(layout, strategy=f"{layout.strategy}-{search.budgets[position]:g}"))
        layouts[-1].write(options.folders.layout_dir(table.name) / f"{layouts[-1].strategy}.yaml")
    # Retrain them on the half of the documents that selects
    subject = Subject.of(options.probe, options.model, "retrain on")
    measured = subject.load(reporter)
    runs, length = options.folders.run_dir(table.name), units.parse_length(str(options.retrain))
    checkpoints = retraining.retrain(
        layouts,
        options.model,
        measured.tokenizer,
        half_of(measured.whole),
        length,
        runs,
        device_name=options.device,
        reporter=reporter,
    )
    return [str(path) for path in checkpoints]
