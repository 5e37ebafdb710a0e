"""Run the ``verdict`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.result import Result
from spkv_nas.stages.verdict.options import VerdictOptions

EXIT_CODES = {"passes": 0, "fails": 1, "open": 3}


def verdict(options: VerdictOptions, reporter: Reporter) -> Result:
    """Decide whether layouts or checkpoints keep up with a dense model. Writes reports/NAME/verdict.csv.

    Candidates are checkpoints, or layout files, which are tried on the weights of --against without training. Both
    models are measured sample by sample, in random order, until the answer is known: passes if the loss is below every
    margin of --margin, fails if it is above one, else open. That any candidate passes wrongly, and that any fails
    wrongly, has a probability of at most --risk each, however early it stops. Documents that a
    layout was selected on are left out, whatever became of the record that says so.

    With --budgets, candidates are the layouts of one probe at each budget. A bisection finds the smallest budget that
    passes, with the same error rate for all of them together. Constraints and memory apply to it alone. Writes
    reports/NAME/critical-budget.csv.

    Exits with 0 if a candidate passes, 1 if all fail, 3 otherwise. Samples are kept in runs/NAME/verdict/ and reused.
    """
    from spkv_nas.stages.verdict import budget_output, budgets, output, stage

    if options.budgets is not None:
        budget = budgets.critical_budget(options, reporter)
        code = EXIT_CODES[budget.answer]
        return Result(budget, budget_output.show, budget_output.document, exit_code=code, next=budget.next)
    result = stage.verdict(options, reporter)
    return Result(result, output.show, output.document, exit_code=EXIT_CODES[result.answer])


def check(options: VerdictOptions) -> None:
    """Check the margins, the risk, the candidates, the text, and the criteria's options."""
    from spkv_nas.base.assets import EMBEDDED_PREFIX
    from spkv_nas.base.errors import UserError
    from spkv_nas.model.source import check_checkpoint
    from spkv_nas.proposal.budget import parse_budgets
    from spkv_nas.proposal.requirements import asks_for_several
    from spkv_nas.stages.checks import check_exist
    from spkv_nas.stages.chosen import chosen_table
    from spkv_nas.stages.options import DENSE
    from spkv_nas.stages.subject import Subject
    from spkv_nas.stages.verdict.budget_options import check_budget_options
    from spkv_nas.stages.verdict.margins import is_layout, parse_margins, parse_risk

    parse_risk(options.risk)
    margins = parse_margins(options.margin)
    check_budget_options(options, options.candidates)
    if options.budgets is not None:
        asks_for_several(options.budgets, options.tau)
        parse_budgets(options.budgets, chosen_table(options).num_candidates)
    for candidate in options.candidates or ():
        if is_layout(candidate):
            check_exist([candidate], "layout")
        else:
            check_checkpoint(candidate)
    reads_text = any(criterion.reads_text for criterion, _ in margins)
    if reads_text and not options.model.startswith(EMBEDDED_PREFIX) and not options.data:
        raise UserError("--against needs --data: files or folders with text that no candidate was selected on")
    Subject.of(options, DENSE, "judge on", reads_text=reads_text).check()
    for criterion, _ in margins:
        criterion.check(options)
