"""Find the smallest budget, of global heads or of memory, whose layout passes against the dense model, by bisection.

Candidates are positions 0 to n - 1, budgets in ascending order. The k-th look tests its candidate at the level
risk / 2^k. Any candidate passes wrongly with a probability of at most ``risk``, whatever the candidates' losses are:
they need not fall from position to position, and the tests may share their samples.

Proof, by induction over the tree of bisection, whose root is tested at half of its risk. If the root should pass,
either it does and bisection goes on below it, or it does not and bisection goes on above; each part errs with at most
half of the risk. If the root should not pass, it does wrongly with at most half of the risk; else bisection goes on
above, with the other half. Where bisection ends, the risk that is left tests further candidates in a fixed order, until
one does not pass.

A second bisection finds the largest candidate that fails in the same way, in the opposite direction. Both look at the
same candidates until one is open. A candidate that only one of them looks at gets only this one's answer. The second
may leave candidates out that were not measured, as if they were open: its tests then reject less, never more. For the
same reason the further candidates may end at any one of them, whether costs or the samples so far make it hopeless.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import pandas as pd

from spkv_nas.artifacts.displacement import Displacement
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import CRITICAL_BUDGET
from spkv_nas.base.progress import SILENT, Bar, Progress, Reporter
from spkv_nas.evaluation.verdict.contenders import Contender
from spkv_nas.evaluation.verdict.criteria import Margins
from spkv_nas.evaluation.verdict.trial import (
    ROUNDS,
    WHOLE_COLUMNS,
    Answer,
    Levels,
    Outcome,
    Pairs,
    Tell,
    Trial,
    displacements,
    nll_alarm,
)

Test = Callable[[int, float], Answer]  # position, level -> answer
# Margins above which a layout's recorded cost rules it out where only unordered losses could let it pass. The costs of
# a small model were 0.9 to 1.5 times its losses
RULED_OUT = 2.5
# Margins above which a loss that neighbours predict does so, too. Losses of neighbours have nearly the same ratio to
# their costs
_UNLIKELY = 1.25


class Chooser(Protocol):
    """Choose the layout of a budget when it is looked at, by measuring several on text that is no sample."""

    def choose(self, position: int, progress: Progress) -> Layout:
        """Return the layout of a position, and call ``progress`` with (forward passes over a block done, total)."""

    def passes_left(self, number: int) -> float:
        """Return about how many forward passes over a block it takes to choose for ``number`` more positions."""


@dataclass(frozen=True, order=True)
class Look:
    """Position that a bisection looked at, with the answer that holds at the risk of the whole bisection.

    ``passes`` and ``fails`` are the largest p-values at which it does; 0 if no bisection asked whether it does.
    """

    position: int
    answer: Answer
    passes: float = 0.0
    fails: float = 0.0


@dataclass(frozen=True)
class Critical:
    """Result of a bisection: the candidates that were looked at, in order of the first look."""

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


def critical(
    number: int,
    risk: float,
    test: Test,
    first: int | None = None,
    is_ruled_out: Callable[[int], bool] = lambda _: False,
) -> Critical:
    """Look for the smallest candidate that passes, and for the largest that fails, by testing candidates at a level.

    Bisections begin in the middle, or at the ``first`` candidate to look at, which must not depend on the samples. From
    a ``first`` one, if any passes, the largest that fails is looked for among those measured by then alone.

    One bisection would miss a smaller candidate that passes where the losses do not fall from position to position. So
    the two candidates below the answer are tested, the nearer one by bisection, and those below as long as they pass;
    but not from one below the nearer one on that ``is_ruled_out``.
    """
    looks: dict[int, Look] = {}

    def look(position: int, level: float, wanted: Literal["passes", "fails"]) -> bool:
        """Test a candidate and return whether it has the answer that this bisection asks for."""
        has_answer = test(position, level) == wanted
        earlier = looks.get(position, Look(position, "open"))
        answer = wanted if has_answer else earlier.answer
        levels = {"passes": earlier.passes, "fails": earlier.fails}
        levels[wanted] = max(level, levels[wanted])
        looks[position] = Look(position, answer, passes=levels["passes"], fails=levels["fails"])
        return has_answer

    # Smallest that passes, and those below it
    _, high, left = _bisect(
        number, risk, lambda position, level: look(position, level, "passes"), first
    )
    below = high - 2
    while high < number and below >= 0 and not is_ruled_out(below) and look(below, left, "passes"):
        below -= 1
    # Largest that fails, and those below it that were measured
    measured = frozenset(looks)
    measures_more = first is None or high == number

    def fails(position: int, level: float) -> bool:
        """Return whether a candidate is found to fail; one that is not to be measured is not."""
        return (measures_more or position in measured) and look(position, level, "fails")

    largest, _, left = _bisect(
        number, risk, lambda position, level: not fails(position, level), first
    )
    below = largest - 1
    while below in measured and looks[below].answer == "open" and look(below, left, "fails"):
        below -= 1
    return Critical(tuple(looks.values()))


def _bisect(
    number: int, risk: float, goes_down: Callable[[int, float], bool], first: int | None = None
) -> tuple[int, int, float]:
    """Bisect positions, and return the last one that went up, the first that went down, and the risk that is left.

    From a ``first`` position it goes in steps of 1, 1, 2, 4, ..., until a position went each way.
    """
    low = -1
    high = number
    step = 1
    middle = (number - 1) // 2 if first is None else first
    while high - low > 1:
        risk /= 2.0
        low, high = (low, middle) if goes_down(middle, risk) else (middle, high)
        middle = (low + high) // 2
        if first is not None and low < 0:
            middle = max(high - max(step // 2, 1), 0)
        elif first is not None and high == number:
            middle = min(low + max(step // 2, 1), number - 1)
        step *= 2
    return low, high, risk


@dataclass(frozen=True, eq=False)
class CriticalBudget(Outcome):
    """Smallest budget that passes, and what is known of the budgets around it.

    ``layouts``, by ascending budget, share the risk; ``margins`` name unit and criterion, for people. A budget is a
    number of global heads, or one of ``memories``, in percent of full attention's KV cache.
    """

    margins: Sequence[str]
    layouts: Sequence[Layout]
    critical: Critical
    memories: Sequence[float] | None
    alarm: str | None  # sentence if the numbers make no sense (``evaluation.alarms``)

    @property
    def budgets(self) -> list[float]:
        """Return the budgets, ascending."""
        return (
            [layout.num_global for layout in self.layouts]
            if self.memories is None
            else [*self.memories]
        )

    @property
    def layout(self) -> Layout | None:
        """Return the layout of the critical budget; None if no budget passes."""
        return None if self.critical.passes is None else self.layouts[self.critical.passes]

    @property
    def passes(self) -> float | None:
        """Return the critical budget: the smallest that passes; None if none does."""
        return None if self.critical.passes is None else self.budgets[self.critical.passes]

    @property
    def fails(self) -> float | None:
        """Return the largest budget below it that fails; None if none does."""
        return None if self.critical.fails is None else self.budgets[self.critical.fails]

    @property
    def answers(self) -> dict[float, Answer]:
        """Return the answer about each budget that was looked at, ascending."""
        return {self.budgets[look.position]: look.answer for look in sorted(self.critical.looks)}

    @property
    def answer(self) -> Answer:
        """Return "passes" if a budget passes, "fails" if the largest fails and no other passes, else "open"."""
        if self.passes is not None:
            return "passes"
        return "fails" if self.fails == self.budgets[-1] else "open"


def find_critical_budget(
    trial: Trial,
    candidates: Sequence[Contender],
    risk: float,
    reporter: Reporter = SILENT,
    memories: Sequence[float] | None = None,
    nll: float | None = None,
    deadline: float | None = None,
    chooser: Chooser | None = None,
) -> CriticalBudget:
    """Bisect layouts, by ascending budget, for the smallest that passes against the dense model.

    Their budgets are their numbers of global heads, or ``memories`` in percent of full attention's KV cache. That any
    passes wrongly, and that any fails wrongly, has a probability of at most ``risk`` each. With the dense model's
    ``nll`` on other text, the first look is at the smallest that passes by the costs that layouts were chosen by. After
    the ``deadline``, in seconds of ``time.monotonic``, no further budget is looked at; at least one is.

    ``chooser`` gives the layout of a position when it is first looked at, in place of the candidate's; it must not
    depend on the trial's samples.
    """
    layouts = [each.layout for each in candidates if each.layout is not None]
    first = first_by_costs(trial.margins, layouts, nll)
    candidates = list(candidates)
    measured: dict[int, Pairs] = {}
    expected = Expected(trial.margins, costs_in_percent(layouts, nll), measured)
    names = _budget_names(layouts, memories)
    with reporter.bar("comparing", ROUNDS) as bar:
        course = _Course(trial, candidates, names, bar, first, expected, chooser)

        def test(position: int, level: float) -> Answer:
            """Measure a budget until its answer at a level is known; keep the larger number of samples."""
            if measured and deadline is not None and time.monotonic() > deadline:
                measured.setdefault(position, {})
                return "open"
            # The second bisection needs no more samples of a budget that passes
            if course.answers.get(position) == "passes":
                return "passes"
            if chooser is not None and position not in measured:
                layouts[position] = _named(course.choose(position), memories, position)
                candidates[position] = Contender.of(layouts[position], candidates[position].source)
            levels = Levels(level, level / len(trial.margins))
            pairs, answer = trial.measure(
                candidates[position], levels, course.teller(position), gives_up=True
            )
            measured[position] = max(
                pairs, measured.get(position, {}), key=lambda each: sum(map(len, each.values()))
            )
            course.answers[position] = answer
            return answer

        bisection = critical(len(layouts), risk, test, first, course.rules_out)
    return _outcome(trial, candidates, risk, layouts, bisection, measured, memories)


def _outcome(
    trial: Trial,
    candidates: Sequence[Contender],
    risk: float,
    layouts: Sequence[Layout],
    bisection: Critical,
    measured: Mapping[int, Pairs],
    memories: Sequence[float] | None,
) -> CriticalBudget:
    """Return the result of a bisection, with what was ``measured`` of each position."""
    scores_of = {candidates[position].name: scores for position, scores in measured.items()}
    looked_at = [each for each in candidates if each.name in scores_of]
    displacement = displacements(trial, looked_at, scores_of)
    return CriticalBudget(
        risk=risk,
        rows=_table(trial, candidates, bisection, measured, memories, displacement),
        nouns=trial.nouns,
        num_samples=trial.num_samples,
        by_position={
            each.name: trial.by_position(each, scores_of[each.name]) for each in looked_at
        },
        displacement=displacement,
        notes={each.name: trial.notes(each, scores_of[each.name]) for each in looked_at},
        margins=[
            f"{margin:g} {criterion.test.unit} ({criterion.name})"
            for criterion, margin in trial.margins
        ],
        layouts=layouts,
        critical=bisection,
        memories=memories,
        alarm=nll_alarm(trial, looked_at, scores_of),
    )


def named_by_memory(layout: Layout, percent: float) -> Layout:
    """Return a layout under the name of its strategy and its memory in percent, such as "window-per-head-12"."""
    return replace(layout, strategy=f"{layout.strategy}-{percent:g}")


def _named(layout: Layout, memories: Sequence[float] | None, position: int) -> Layout:
    """Return the layout of a position, named by its memory if the budgets are memories."""
    return layout if memories is None else named_by_memory(layout, memories[position])


def _budget_names(layouts: Sequence[Layout], memories: Sequence[float] | None) -> list[str]:
    """Return the budgets in words, by position."""
    if memories is None:
        return [f"{layout.num_global} heads" for layout in layouts]
    return [f"{memory:g} % of the KV cache" for memory in memories]


def _table(
    trial: Trial,
    candidates: Sequence[Contender],
    bisection: Critical,
    measured: Mapping[int, Pairs],
    memories: Sequence[float] | None,
    displacement: Mapping[str, Displacement],
) -> pd.DataFrame:
    """Tabulate what was measured of each budget; an end of an interval holds at the level of its bisection."""
    rows = []
    for number, look in enumerate(bisection.looks, 1):
        candidate = candidates[look.position]
        assert candidate.layout is not None
        head = {
            "candidate": candidate.name,
            "num_global": candidate.layout.num_global,
            "memory": None if memories is None else memories[look.position],
            "look": number,
            "passes_level": look.passes,
            "fails_level": look.fails,
            "result": look.answer,
        }
        levels = Levels(look.passes, look.fails / len(trial.margins))
        risks = look.fails, look.passes
        measured_rows = trial.rows(
            measured[look.position], levels, risks, displacement.get(candidate.name)
        )
        rows += [{**head, **row} for row in measured_rows]
    return pd.DataFrame(rows, columns=CRITICAL_BUDGET.header[:-1]).astype(WHOLE_COLUMNS)


def first_by_costs(
    margins: Margins, layouts: Sequence[Layout], nll: float | None, factor: float = 1.0
) -> int | None:
    """Return the first layout whose recorded cost is below ``factor`` margins of NLL, or the last; None if unknown.

    ``nll`` is the dense model's, in nats per token as the costs.
    """
    margin = _nll_margin(margins)
    costs = costs_in_percent(layouts, nll)
    if margin is None or costs is None:
        return None
    passing = (index for index, cost in enumerate(costs) if cost <= factor * margin)
    return next(passing, len(layouts) - 1)


def costs_in_percent(layouts: Sequence[Layout], nll: float | None) -> list[float] | None:
    """Return the recorded costs of layouts in percent of the dense model's ``nll``; None if one is unknown."""
    costs = [layout.provenance.get("cost") for layout in layouts]
    if nll is None or not all(isinstance(cost, float) for cost in costs):
        return None
    return [100.0 * float(str(cost)) / nll for cost in costs]


def _nll_margin(margins: Margins) -> float | None:
    """Return the margin of NLL in percent; None if it is no criterion."""
    return next((margin for criterion, margin in margins if criterion.name == "nll"), None)


@dataclass(frozen=True)
class Expected:
    """Losses that are expected of budgets, from their costs and the losses of budgets that were measured."""

    margins: Margins
    costs: Sequence[float] | None  # in percent of the NLL, by position; None: unknown
    measured: Mapping[int, Pairs]  # by position

    def rules_out(self, position: int, answers: Mapping[int, Answer]) -> bool:
        """Return whether only losses that do not fall with the budget could let a position pass.

        The loss of the next position corrects its costs where that one fails. Where it is open, this one may be the
        largest that fails.
        """
        margin = _nll_margin(self.margins)
        if self.costs is None or margin is None:
            return False
        if self.costs[position] > RULED_OUT * margin:
            return True
        if answers.get(position + 1) != "fails":
            return False
        return self.costs[position] * self._loss_by_cost(position + 1) > _UNLIKELY * margin

    def exceeds_margin(self, position: int, measured: int) -> bool:
        """Return whether the cost of a position, corrected by the loss of a measured one, exceeds the margin."""
        margin = _nll_margin(self.margins)
        if self.costs is None or margin is None or measured not in self.measured:
            return False
        return self.costs[position] * self._loss_by_cost(measured) > margin

    def _loss_by_cost(self, position: int) -> float:
        """Return the ratio of the loss of a position to its cost; 1 if it was not measured."""
        assert self.costs is not None
        pairs = self.measured.get(position, {}).get("nll", np.empty((0, 2)))
        test = next(criterion.test for criterion, _ in self.margins if criterion.name == "nll")
        cost = self.costs[position]
        return test.loss(pairs) / cost if len(pairs) and cost > 0.0 else 1.0


@dataclass(frozen=True)
class _Course:
    """Course of a bisection: what was answered, and the rounds that it has left, which a bar shows."""

    trial: Trial
    candidates: Sequence[Contender]
    names: Sequence[str]  # of the budgets, for people
    bar: Bar
    first: int | None
    expected: Expected
    chooser: Chooser | None
    answers: dict[int, Answer] = field(default_factory=dict)
    # Rounds that choosing a layout took, by position
    chosen: dict[int, float] = field(default_factory=dict)

    def choose(self, position: int) -> Layout:
        """Return the layout that the chooser gives a position, and show its progress."""
        assert self.chooser is not None
        note = f"{self.names[position]}, choosing a layout"

        def tell(done: int, total: int) -> None:
            """Show the forward passes that were done, as rounds beside those of the comparison."""
            self.chosen[position] = done / self._round_size
            comparing = self.trial.work([self.candidates[position], self.trial.store.contender])
            left = comparing + (total - done) / self._round_size
            later = self._work(self._later(position, self.answers))
            self._show(left + later, f"{note}: {done} of {total} passes")

        layout = self.chooser.choose(position, tell)
        self.chosen.setdefault(position, 0.0)
        return layout

    def rules_out(self, position: int) -> bool:
        """Return whether a position is not worth a look, by the answers so far (``Expected``)."""
        return self.expected.rules_out(position, self.answers)

    def teller(self, position: int) -> Tell:
        """Return what shows the progress of measuring a candidate."""

        def tell(left: float, chances: Mapping[Answer, float], note: str) -> None:
            """Show the rounds that were measured, and that are left of this candidate and of later ones."""
            later = self._work(self._later(position, self.answers))
            if chances:
                later = sum(
                    chance * self._work(self._later(position, {**self.answers, position: answer}))
                    for answer, chance in chances.items()
                )
            self._show(left + later, f"{self.names[position]}, {note}")

        return tell

    @property
    def _round_size(self) -> int:
        """Return the samples of a round, each of about a block."""
        return next(iter(self.trial.samples.values())).size

    def _later(self, position: int, answers: Mapping[int, Answer]) -> list[int]:
        """Return the positions that are likely to be looked at after one."""
        return [index for index in self.rehearse(answers) if index != position]

    def _work(self, later: Sequence[int]) -> float:
        """Return the rounds that it takes to choose and to measure the positions that are looked at later."""
        work = self.trial.work([self.candidates[index] for index in later])
        if self.chooser is not None:
            not_chosen = [index for index in later if index not in self.chosen]
            work += self.chooser.passes_left(len(not_chosen)) / self._round_size
        return work

    def _show(self, left: float, note: str) -> None:
        """Show the rounds that were done, beside those that are left."""
        done = self.trial.store.num_measured + math.floor(sum(self.chosen.values()))
        self.bar(done, done + math.ceil(left), note)

    def rehearse(self, answers: Mapping[int, Answer]) -> list[int]:
        """Return the candidates without an answer that the bisection is going to look at, if the others are likely.

        From the smallest that passes on all are taken to pass, and below the largest that does not none. Between these
        two passing begins at the first look, which costs or the middle chose, or at the first budget that passes by
        costs which the loss of a measured one corrects.
        """
        number = len(self.candidates)
        high = min(
            (position for position, answer in answers.items() if answer == "passes"), default=number
        )
        low = max(
            (
                position
                for position, answer in answers.items()
                if answer != "passes" and position < high
            ),
            default=-1,
        )
        middle = (low + high + 1) // 2 if self.first is None else self.first
        border = min(max(middle, low + 1), high)
        while border < high and self.expected.exceeds_margin(border, low):
            border += 1
        looked_at: dict[int, Answer] = {}

        def test(position: int, _: float) -> Answer:
            """Answer as was measured, or as is likely."""
            likely: Answer = "passes" if position >= border else "open"
            return looked_at.setdefault(position, answers.get(position, likely))

        critical(number, 1.0, test, self.first, self.rules_out)
        return [position for position in looked_at if position not in answers]
