"""Run the ``verdict`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.evaluation.verdict.margins import options_help
from spkv_nas.stages.judging import EXIT_CODES
from spkv_nas.stages.result import Result
from spkv_nas.stages.verdict.options import VerdictOptions


def verdict(options: VerdictOptions, reporter: Reporter) -> Result:
    """Decide whether layouts or checkpoints keep up with a dense model. Writes reports/NAME/verdict.csv.

    Candidates are checkpoints, or layout files, which are tried on the weights of --against without training. Both
    models are measured sample by sample, in random order, until the answer is known: passes if the loss is below every
    margin of --margin, fails if it is above one, else open. That any candidate passes wrongly, and that any fails
    wrongly, has a probability of at most --risk each, however early it stops. Documents that a
    layout was selected on are left out, whatever became of the record that says so.

    Exits with 0 if a candidate passes, 1 if all fail, 3 otherwise. Samples are kept in runs/NAME/verdict/ and reused.
    """
    from spkv_nas.stages.verdict import stage

    result = stage.verdict(options, reporter)
    return Result(result, stage.show, stage.document, exit_code=EXIT_CODES[result.answer])


verdict.__doc__ = f"{verdict.__doc__}\n\n{options_help()}\n"
