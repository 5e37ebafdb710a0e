"""Run the ``critical-budget`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.critical_budget.options import CriticalBudgetOptions
from spkv_nas.stages.judging import EXIT_CODES
from spkv_nas.stages.result import Result


def critical_budget(options: CriticalBudgetOptions, reporter: Reporter) -> Result:
    """Find the smallest budget of global heads that keeps up with a dense model.

    A bisection of the budgets tests their layouts on the weights of --against, as verdict does, until the smallest that
    passes is known. That any budget passes wrongly, and that any fails wrongly, has a probability of at most --risk
    each, for all budgets together. For layouts with constraints, or with other windows, sinks or thresholds than the
    probe's, give the files that propose writes for several budgets. Writes reports/NAME/critical-budget.csv.

    Exits with 0 if a budget passes, 1 if the largest fails and no other passes, 3 otherwise. Samples are kept in
    runs/NAME/verdict/ and reused. spkv-nas verdict --help describes the criteria.
    """
    from spkv_nas.stages.critical_budget import stage

    result = stage.critical_budget(options, reporter)
    return Result(result, stage.show, stage.document, exit_code=EXIT_CODES[result.answer], next=result.next)
