"""Find the smallest of many ordered candidates that passes, by bisection, with an error rate for all that it looks at.

Candidates are positions 0 to n - 1, such as budgets in ascending order. The k-th look tests its candidate at the level
risk / 2^k. Any candidate passes wrongly with a probability of at most ``risk``, whatever the candidates' losses are:
they need not fall from position to position, and the tests may share their samples.

Proof, by induction over the tree of bisection, whose root is tested at half of its risk. If the root should pass,
either it does and bisection goes on below it, or it does not and bisection goes on above; each part errs with at most
half of the risk. If the root should not pass, it does wrongly with at most half of the risk; else bisection goes on
above, with the other half. Where bisection ends, the risk that is left tests further candidates in a fixed order, until
one does not pass.

A second bisection finds the largest candidate that fails in the same way, in the opposite direction. Both look at the
same candidates until one is open. A candidate that only one of them looks at gets only this one's answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from spkv_nas.evaluation.verdict.decision import Answer

Test = Callable[[int, float], Answer]  # position, level -> answer


@dataclass(frozen=True, order=True)
class Look:
    """Candidate that a bisection looked at.

    Attributes:
        position: position of the candidate.
        answer: answer that holds at the risk of the whole bisection.
        passes: largest p-value at which it passes; 0 if no bisection asked whether it does.
        fails: largest p-value at which it fails; 0 if no bisection asked whether it does.
    """

    position: int
    answer: Answer
    passes: float = 0.0
    fails: float = 0.0


@dataclass(frozen=True)
class Critical:
    """Result of a bisection.

    Attributes:
        looks: candidates that were looked at, in order of the first look.
    """

    looks: tuple[Look, ...]

    @property
    def passes(self) -> int | None:
        """Return the smallest position that passes; None if none does."""
        return min((look.position for look in self.looks if look.answer == "passes"), default=None)

    @property
    def fails(self) -> int | None:
        """Return the largest position that fails below the smallest that passes; None if none does."""
        end = self.passes
        failed = (look.position for look in self.looks if look.answer == "fails")
        return max((position for position in failed if end is None or position < end), default=None)


def critical(number: int, risk: float, test: Test) -> Critical:
    """Look for the smallest candidate that passes, and for the largest that fails.

    One bisection would miss a smaller candidate that passes where the losses do not fall from position to position. So
    the two candidates below the answer are tested, the nearer one by bisection, and those below as long as they pass.

    Args:
        number: number of candidates, at least 1.
        risk: largest probability that any candidate passes wrongly, and that any fails wrongly.
        test: tests a candidate at a level.
    """
    looks: dict[int, Look] = {}

    def look(position: int, level: float, wanted: Literal["passes", "fails"]) -> bool:
        """Test a candidate and return whether it has the answer that this bisection asks for."""
        has_answer = test(position, level) == wanted
        earlier = looks.get(position, Look(position, "open"))
        answer = wanted if has_answer else earlier.answer
        levels = {"passes": earlier.passes, "fails": earlier.fails, wanted: level}
        looks[position] = Look(position, answer, **levels)
        return has_answer

    # Smallest that passes, and those below it
    _, high, left = _bisect(number, risk, lambda position, level: look(position, level, "passes"))
    below = high - 2
    while high < number and below >= 0 and look(below, left, "passes"):
        below -= 1
    # Largest that fails
    _bisect(number, risk, lambda position, level: not look(position, level, "fails"))
    return Critical(tuple(looks.values()))


def _bisect(number: int, risk: float, goes_down: Callable[[int, float], bool]) -> tuple[int, int, float]:
    """Bisect positions, and return the last one that went up, the first that went down, and the risk that is left."""
    low, high = -1, number
    while high - low > 1:
        middle, risk = (low + high) // 2, risk / 2.0
        low, high = (low, middle) if goes_down(middle, risk) else (middle, high)
    return low, high, risk
