"""Detection of harm by retraining: compare the control with the unchanged dense model, and layouts before and after.

A finished model restarted at a high learning rate gets worse, and the control with it, so that layouts look good next
to it although they lost much. A difference within its standard error, or on few documents, is no evidence of harm.
"""

from spkv_nas.base.progress import Reporter
from spkv_nas.evaluation.paired import DocumentNLL, PairedDifference, paired_difference
from spkv_nas.evaluation.ranking import MIN_DOCUMENTS
from spkv_nas.training.recipe import Recipe

MAX_HARM = 0.1  # percent of NLL
WARMUP_SHARE = 0.1  # recommended warm-up, as a share of a branch's steps
_LOWER_RATE = 3.0  # factor by which to reduce a harmful learning rate


def compare_control(control: DocumentNLL, dense: DocumentNLL, recipe: Recipe, reporter: Reporter) -> None:
    """Announce how much retraining changed the held-out NLL of full attention, and warn with a remedy if it did harm.

    ``control`` is its NLL after retraining, ``dense`` that of the unchanged dense model on the same text.
    """
    # Measure the change, and judge it only on enough documents
    change = paired_difference(control, dense)
    measured = f"full attention retrained (the control) has {_amount(change)} NLL than the dense model as it is"
    if (number := control.num_documents) < MIN_DOCUMENTS:
        reporter.announce(f"{measured}, on {number} documents: too few to say whether retraining harms the model")
        return
    if is_worse(change, MAX_HARM):
        reporter.caution(f"warning: {measured}: this retraining harms the model, and layouts with it\n{remedy(recipe)}")
        return
    reporter.announce(measured)
    # Explain gains that come from the dense phase
    if recipe.dense is not None:
        reporter.announce(
            "the recipe's dense phase ends at its peak learning rate, and branches are its decay: every row gains by "
            "it, so the change against the control says what a layout costs"
        )


def caution_if_worse(name: str, retrained: DocumentNLL, untrained: DocumentNLL, reporter: Reporter) -> None:
    """Warn about a layout whose held-out NLL is higher after retraining than without training."""
    change = paired_difference(retrained, untrained)
    if is_worse(change) and retrained.num_documents >= MIN_DOCUMENTS:
        reporter.caution(f"warning: {name} has {_amount(change)} NLL retrained than before it was retrained")


def is_worse(change: PairedDifference, most: float = 0.0) -> bool:
    """Return True if a change is an increase of more than ``most`` percent and more than its standard error."""
    return change.percent > most and change.percent > change.standard_error


def remedy(recipe: Recipe) -> str:
    """Return advice on the recipe: a lower learning rate, and a longer warm-up if it is below ``WARMUP_SHARE``."""
    branch = recipe.branch
    lower, warmup = branch.learning_rate / _LOWER_RATE, max(1, round(WARMUP_SHARE * branch.steps))
    keys = f"branch.learning_rate: {lower:.1g} (now {branch.learning_rate:g})"
    if branch.warmup_steps < warmup < branch.steps:
        keys += f" and branch.warmup_steps: {warmup} (now {branch.warmup_steps})"
    return f"try {keys}"


def _amount(change: PairedDifference) -> str:
    """Format a change, such as "0.42 ± 0.08 % less"."""
    return f"{abs(change.percent):.2f} ± {change.standard_error:.2f} % {'more' if change.percent > 0 else 'less'}"
