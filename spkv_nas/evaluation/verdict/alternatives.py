"""Choose, of alternative criteria such as ``needles=5|recall=10``, the first that the dense model can be judged by."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from spkv_nas.base.errors import UserError
from spkv_nas.evaluation.verdict.criterion import Criterion, MeanDrop, Rounds, Setting

if TYPE_CHECKING:
    from spkv_nas.evaluation.verdict.contenders import ScoreStore

Margin = tuple[Criterion, float]
Judged = tuple[Criterion, float, Rounds]  # criterion with its margin and its samples


@dataclass(frozen=True)
class Alternatives(Criterion):
    """Several criteria with their margins, of which the first that the dense model can be judged by counts."""

    name = "alternatives"
    help = "the first of several criteria that the dense model can be judged by"
    test = MeanDrop()

    margins: tuple[Margin, ...] = ()

    def check(self) -> None:
        """Check the options of all of them."""
        for criterion, _ in self.margins:
            criterion.check()

    def prepare(self, setting: Setting) -> Rounds:
        """Refuse: one of them is chosen first (``prepared``)."""
        raise AssertionError("one of the alternatives is to be chosen first")


def prepared(margins: Sequence[Margin], setting: Setting, store: "ScoreStore") -> list[Judged]:
    """Return every criterion with its margin and samples; of alternatives one, or none, with a warning.

    Raises ``UserError`` if a criterion has no samples, or the dense model cannot be judged by it, and no alternative is
    left; or if no criterion is.
    """
    judged: list[Judged] = []
    reasons: list[str] = []
    for criterion, margin in margins:
        if not isinstance(criterion, Alternatives):
            judged.append((criterion, margin, _samples(criterion, setting, store)))
            continue
        for other, allowed in criterion.margins:
            try:
                judged.append((other, allowed, _samples(other, setting, store)))
                break
            except UserError as error:
                reasons.append(str(error))
                setting.reporter.announce(str(error))
        else:
            names = " and ".join(other.name for other, _ in criterion.margins)
            setting.reporter.caution(
                f"{names} judge nothing of this model and text, so they are left out"
            )
    if not judged:
        raise UserError(reasons[-1])
    return judged


def _samples(criterion: Criterion, setting: Setting, store: "ScoreStore") -> Rounds:
    """Return the samples of a criterion. Raises ``UserError`` if there are none, or they say nothing of the model."""
    rounds = criterion.prepare(setting)
    rounds.check_dense(partial(store.score, store.contender, rounds))
    return rounds
