"""Decide over all candidates and criteria, so that the risk of a wrong answer holds for all of them together.

A candidate passes if its loss is below the margin in every criterion. If it is not in one, that criterion alone stops
it, so several criteria need no correction. Several candidates share the risk by Holm's test, whatever their dependence.
A candidate fails if its loss is above the margin in any criterion; there the risk is shared by the criteria too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from spkv_nas.base.sequential import holm
from spkv_nas.evaluation.verdict.loss_tests import Evidence

Answer = Literal["passes", "fails", "open"]


@dataclass(frozen=True)
class Levels:
    """Largest p-values at which a candidate passes, and at which one of its criteria fails; 0: not tested."""

    passes: float
    fails: float

    @classmethod
    def of(cls, risk: float, answers: Sequence[Answer], *, num_candidates: int, num_criteria: int) -> Levels:
        """Return the levels of a candidate, given the answers about others: the steps of Holm's test."""
        num_open = [num_candidates - sum(other == answer for other in answers) for answer in ("passes", "fails")]
        return cls(risk / num_open[0], risk / (num_open[1] * num_criteria))

    def answer(self, evidence: Evidence) -> Answer:
        """Return the answer about one criterion."""
        if self.fails and evidence.p_fails <= self.fails:
            return "fails"
        return "passes" if self.passes and evidence.p_passes <= self.passes else "open"


def decide(evidence: Mapping[str, Mapping[str, Evidence]], criteria: Sequence[str], risk: float) -> dict[str, Answer]:
    """Return the answer about each candidate.

    Args:
        evidence: by candidate and criterion; a criterion that was not measured (yet) is missing.
        criteria: names of all criteria.
        risk: largest probability that any candidate passes wrongly, and that any fails wrongly.
    """
    # A candidate passes by all criteria, and fails by any of them (Bonferroni)
    passes = [
        max(by_criterion[name].p_passes if name in by_criterion else 1.0 for name in criteria)
        for by_criterion in evidence.values()
    ]
    fails = [
        min(1.0, len(criteria) * min((each.p_fails for each in by_criterion.values()), default=1.0))
        for by_criterion in evidence.values()
    ]
    # Correct for the number of candidates (Holm)
    answers: dict[str, Answer] = {}
    for name, has_passed, has_failed in zip(evidence, holm(passes, risk), holm(fails, risk), strict=True):
        answers[name] = "fails" if has_failed else "passes" if has_passed else "open"
    return answers
