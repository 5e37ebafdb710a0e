"""Check whether retraining harms: the control against the dense model as it is, a layout against itself before.

A finished model that is restarted at a high learning rate gets worse. The control gets worse with it, so layouts look
good beside it that cost several times as much in use. Two rules decide what is cautioned against:

- The control may be ``MOST_HARM`` percent worse than the dense model as it is, and a layout not at all worse than
  before it was retrained.
- A difference within its standard error is no evidence of harm. The control's is announced either way, with its error,
  so that nobody takes "no caution" for "no change".
"""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.evaluation.paired import DocumentNLL, PairedDifference, paired_difference
from spkv_nas.training.recipe import Recipe

MOST_HARM = 0.1  # percent of NLL
WARMUP_SHARE = 0.1  # of a branch's steps
_LOWER_RATE = 3.0  # what a learning rate that harms is divided by


def compare_control(control: DocumentNLL, dense: DocumentNLL, recipe: Recipe, reporter: Reporter) -> None:
    """Announce how retraining alone changed held-out NLL; caution, with a remedy, where it harmed the control."""
    change = paired_difference(control, dense)
    measured = f"full attention retrained (the control) has {_amount(change)} NLL than the dense model as it is"
    if is_worse(change, MOST_HARM):
        reporter.caution(f"warning: {measured}: this retraining harms the model, and layouts with it\n{remedy(recipe)}")
        return
    reporter.announce(measured)
    if recipe.dense is not None:
        reporter.announce(
            "the recipe's dense phase ends at its peak learning rate, and branches are its decay: every row gains by "
            "it, so the change against the control says what a layout costs"
        )


def caution_if_worse(name: str, retrained: DocumentNLL, untrained: DocumentNLL, reporter: Reporter) -> None:
    """Caution against a layout that has a higher held-out NLL once retrained than without training."""
    change = paired_difference(retrained, untrained)
    if is_worse(change):
        reporter.caution(f"warning: {name} has {_amount(change)} NLL retrained than before it was retrained")


def is_worse(change: PairedDifference, most: float = 0.0) -> bool:
    """Return whether a change is an increase of more than ``most`` percent, and more than its standard error."""
    return change.percent > most and not change.percent <= change.standard_error  # the error of one document is NaN


def remedy(recipe: Recipe) -> str:
    """Return what to change in the recipe: a lower learning rate, and warm-up if it has less than a tenth."""
    branch = recipe.branch
    lower, warmup = branch.learning_rate / _LOWER_RATE, max(1, round(WARMUP_SHARE * branch.steps))
    keys = f"branch.learning_rate: {lower:.1g} (now {branch.learning_rate:g})"
    if branch.warmup_steps < warmup < branch.steps:
        keys += f" and branch.warmup_steps: {warmup} (now {branch.warmup_steps})"
    return f"try {keys}"


def _amount(change: PairedDifference) -> str:
    """Such as "0.42 ± 0.08 % less"."""
    return f"{abs(change.percent):.2f} ± {change.standard_error:.2f} % {'more' if change.percent > 0 else 'less'}"
