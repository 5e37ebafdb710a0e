"""Declare the options of the ``verdict`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag
from spkv_nas.evaluation.verdict.margins import options_help
from spkv_nas.stages.options.margins import DecisionOptions, check_decision, is_layout

Candidates = Annotated[list[str], Flag("Checkpoints, and layout files (YAML).", metavar="CANDIDATE", argument=True)]


@dataclass(frozen=True, kw_only=True)
class VerdictOptions(DecisionOptions):
    """Decide whether layouts or checkpoints lose less than a margin against a dense model.

    Writes reports/NAME/verdict.csv.

    Candidates are checkpoints, or layout files, which are tried on the weights of --against without training. Both
    models are measured sample by sample, in random order, until the answer is known: passes if the loss is below every
    margin of --margin, fails if it is above one, else open. That any candidate passes wrongly, and that any fails
    wrongly, has a probability of at most --risk each, however early it stops. Documents that a layout was selected on
    are left out, even if the probe that says so was deleted.

    Exits with 0 if a candidate passes, 1 if all fail, 3 otherwise. Samples are kept in runs/NAME/verdict/ and reused.
    """

    candidates: Candidates


VerdictOptions.__doc__ = f"{VerdictOptions.__doc__}\n\n{options_help()}\n"


def check(options: VerdictOptions) -> None:
    """Check the margins, the risk, the candidates, the text, and the criteria's options."""
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.model.source import check_checkpoint

    check_decision(options)
    for candidate in options.candidates:
        if is_layout(candidate):
            Layout.read(candidate)
        else:
            check_checkpoint(candidate)
