"""Find the smallest budget of global heads whose layout passes against the dense model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import CRITICAL_BUDGET
from spkv_nas.base.progress import SILENT, Reporter, part_of
from spkv_nas.evaluation.verdict.bisection import Critical, critical
from spkv_nas.evaluation.verdict.contenders import Contender
from spkv_nas.evaluation.verdict.decision import Answer, Levels
from spkv_nas.evaluation.verdict.trial import Outcome, Pairs, Trial


@dataclass(frozen=True)
class CriticalBudget(Outcome):
    """Smallest budget that passes, and what is known of the budgets around it.

    Attributes:
        margins: margins with unit and criterion, for people.
        layouts: the layout of each budget, which share the risk, by ascending number of global heads.
        critical: the bisection of ``layouts``.
    """

    margins: Sequence[str]
    layouts: Sequence[Layout]
    critical: Critical

    @property
    def budgets(self) -> list[int]:
        """Return the numbers of global heads, ascending."""
        return [layout.num_global for layout in self.layouts]

    @property
    def layout(self) -> Layout | None:
        """Return the layout of the critical budget; None if no budget passes."""
        return None if self.critical.passes is None else self.layouts[self.critical.passes]

    @property
    def passes(self) -> int | None:
        """Return the critical budget: the smallest that passes; None if none does."""
        return None if self.layout is None else self.layout.num_global

    @property
    def fails(self) -> int | None:
        """Return the largest budget below it that fails; None if none does."""
        return None if self.critical.fails is None else self.budgets[self.critical.fails]

    @property
    def answers(self) -> dict[int, Answer]:
        """Return the answer about each budget that was looked at, ascending."""
        return {self.budgets[look.position]: look.answer for look in sorted(self.critical.looks)}

    @property
    def answer(self) -> Answer:
        """Return "passes" if a budget passes, "fails" if the largest fails and no other passes, else "open"."""
        if self.passes is not None:
            return "passes"
        return "fails" if self.fails == self.budgets[-1] else "open"


def find_critical_budget(
    trial: Trial, candidates: Sequence[Contender], risk: float, reporter: Reporter = SILENT
) -> CriticalBudget:
    """Bisect candidates for the smallest that passes against the dense model.

    Args:
        trial: criteria and samples.
        candidates: layouts by ascending number of global heads.
        risk: largest probability that any budget passes wrongly, and that any fails wrongly.
        reporter: receives progress.
    """
    layouts = [each.layout for each in candidates if each.layout is not None]
    measured: dict[int, Pairs] = {}
    with reporter.bar("comparing") as bar:

        def test(position: int, level: float) -> Answer:
            """Measure a budget until its answer at a level is known; keep the larger number of samples."""
            levels = Levels(level, level / len(trial.margins))
            title = f"{layouts[position].num_global} heads"
            progress = part_of(bar, len(measured), 1 + 2 * len(layouts).bit_length(), title)
            pairs, answer = trial.measure(candidates[position], levels, progress)
            measured[position] = max(pairs, measured.get(position, {}), key=lambda each: sum(map(len, each.values())))
            return answer

        bisection = critical(len(layouts), risk, test)
    # Fill the table; an end of an interval holds at the level of its bisection
    rows = []
    for number, look in enumerate(bisection.looks, 1):
        levels, risks = Levels(look.passes, look.fails / len(trial.margins)), (look.fails, look.passes)
        size = layouts[look.position].num_global
        head = {"num_global": size, "look": number, "level": max(risks), "result": look.answer}
        rows += [{**head, **row} for row in trial.rows(measured[look.position], levels, risks)]
    table = pd.DataFrame(rows, columns=CRITICAL_BUDGET.header[:-1]).astype({"more_samples": "Int64"})
    margins = [f"{margin:g} {criterion.test.unit} ({criterion.name})" for criterion, margin in trial.margins]
    return CriticalBudget(risk, table, trial.nouns, trial.num_samples, margins, layouts, bisection)
