"""Draw one conclusion from all evidence on a page: the layout it is about, and how sure that is.

The headline, the figures at the top, the tags in tables, the explorer's initial layout, its file and the recommended
command all come from one ``Verdict``, so that they cannot contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.artifacts.score_kind import Measure
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report.evidence import COMPARISON, Evidence, Result, all_evidence
from spkv_nas.report.formatting import above, listed, number, signed, standard_errors
from spkv_nas.report.inputs import ReportInputs, widest_layout

_MAX_NAMED = 4
_RUNS = "None of these errors includes the variation between training runs."
TIED, UNKNOWN, BEHIND = "tied", "unknown", "behind"  # standing of a layout relative to the best
_WORDS = {
    TIED: "Not significantly different from it, within {margin} of the difference",
    UNKNOWN: "Measured higher, though no standard error of the difference is known, so that the order is not "
    "established",
    BEHIND: "Significantly higher, by more than {margin} of the difference",
}


@dataclass(frozen=True)
class Step:
    """A recommended command, and what it does."""

    purpose: str
    command: str


Advise = Callable[["Verdict"], Sequence[Step]]


@dataclass(frozen=True, eq=False)
class Verdict:
    """The conclusion from all evidence on a page.

    Attributes:
        num_heads: KV heads of the model.
        measure: quantity that the table holds.
        layout: the layout that the page is about: the one with the lowest NLL, or before training with the highest
            coverage; None if there is none.
        evidence: the evidence that decided; None before training.
        others: the other layouts of the same budget, in order.
        standings: ``TIED`` (within ``critical`` standard errors of the difference), ``BEHIND`` or ``UNKNOWN``, for
            each of the others.
        errors: standard error of each difference from the best, in percentage points; NaN: unknown.
        covered: coverage of the layout, in [0, 1]; None if its heads are unknown.
        summary: the first sentence if there is no layout.
        critical: standard errors on either side of a 95 % interval.
    """

    num_heads: int
    measure: Measure
    layout: Result | None = None
    evidence: Evidence | None = None
    others: tuple[Result, ...] = ()
    standings: tuple[str, ...] = ()
    errors: tuple[float, ...] = ()
    covered: float | None = None
    summary: str = ""
    critical: float = 2.0

    @cached_property
    def is_clear(self) -> bool:
        """Return True if every other layout is significantly behind."""
        return all(standing == BEHIND for standing in self.standings)

    def standing(self, name: str) -> str | None:
        """Return the standing of another layout of the budget; None for the best and for unknown names."""
        return next(
            (standing for other, standing in zip(self.others, self.standings, strict=True) if other.name == name), None
        )

    def tag(self, name: str, source: str, steps: float | None = None) -> str:
        """Return a short label for a layout's row in a table; "" where the verdict does not apply.

        Args:
            name: of the layout.
            source: table that the row belongs to, ``COMPARISON`` or ``SEARCH``.
            steps: the row's number of steps, if the rows of its table differ in them.
        """
        if self.evidence is None or self.layout is None or self.evidence.source != source:
            return ""
        if steps is not None and not np.isclose(steps, self.evidence.steps, equal_nan=True):
            return ""
        if name == self.layout.name:
            return "lowest NLL" if self.is_clear else "lowest measured NLL"
        return "not significantly different" if self.standing(name) == TIED else ""

    @cached_property
    def lead(self) -> tuple[str, str, str]:
        """Return the first sentence in three parts; the second is the layout's name, "" without one."""
        if self.layout is None:
            return self.summary, "", ""
        if self.evidence is None:
            return self._before_training
        name, count = self.layout.name, 1 + len(self.others)
        competition = f"{self._budget}, {self.evidence.description}"
        if count == 1:
            return "", name, f" is the only layout measured{competition}: {self._value}."
        if self.is_clear:
            return "", name, f" has the lowest NLL of {count} layouts{competition}: {self._value}."
        if TIED in self.standings:
            num_tied = 1 + self.standings.count(TIED)
            opening = f"No single best of {count} layouts{competition}: {num_tied} are not significantly different; "
            return opening, name, f" is measured lowest, {self._value}."
        return "", name, f" has the lowest measured NLL of {count} layouts{competition}: {self._value}."

    @property
    def sentences(self) -> list[str]:
        """Return the other sentences: which layouts are not significantly different, unknown or behind."""
        if self.layout is not None and self.evidence is None:
            return ["No layout has been retrained yet, so it is not known which has the lowest NLL."]
        margin = standard_errors(self.critical)
        sentences = [
            f"{template.format(margin=margin)}, in percentage points: {listed(named, _MAX_NAMED)}."
            for standing, template in _WORDS.items()
            if (named := self._named(standing))
        ]
        return [*sentences[:-1], f"{sentences[-1]} {_RUNS}"] if sentences else []

    def _named(self, standing: str) -> list[str]:
        """Return the layouts of a standing, each with its difference from the best."""
        if self.layout is None:
            return []
        named = []
        for other, other_standing, error in zip(self.others, self.standings, self.errors, strict=True):
            if other_standing == standing and not math.isnan(difference := other.delta - self.layout.delta):
                plus_minus = "" if math.isnan(error) else f" ± {number(error, 3)}"
                named.append(f"{other.name} {signed(difference)}{plus_minus}")
        return named

    @property
    def _budget(self) -> str:
        """Return the number of global heads in words; "" if it is unknown."""
        if self.layout is None or math.isnan(self.layout.num_global):
            return ""
        return f" with {self.layout.num_global:.0f} of {self.num_heads} KV heads global"

    @property
    def _value(self) -> str:
        """Return the best layout's change of NLL in words, or its NLL."""
        if self.layout is None or self.evidence is None:
            return ""
        if math.isnan(self.layout.delta):
            return f"{number(self.layout.nll, 4)} nats per token"
        return above(self.layout.delta, self.layout.error, self.evidence.baseline)

    @property
    def _before_training(self) -> tuple[str, str, str]:
        """Return the first sentence on layouts that have only been proposed."""
        if self.layout is None or self.covered is None:
            return "", "", ""
        num_layouts = 1 + len(self.others)
        noun = f"{self.measure.noun} coverage: {100 * self.covered:.1f} %."
        if num_layouts == 1:
            return "", self.layout.name, f" is the only layout proposed{self._budget}; its {noun}"
        return f"Of {num_layouts} layouts{self._budget}, ", self.layout.name, f" has the highest {noun}"


def conclude(inputs: ReportInputs) -> Verdict:
    """Return the verdict on everything that a page shows.

    The evidence with the most retraining steps and several layouts of one budget decides; before retraining, coverage.
    """
    if inputs.alarm is not None:
        return Verdict(inputs.table.num_heads, inputs.table.measure, summary=f"Warning: {inputs.alarm}")
    retrained = [evidence for evidence in all_evidence(inputs) if evidence.steps != 0]
    deciding = next(
        (evidence for evidence in retrained if len(evidence.of_one_budget) > 1), next(iter(retrained), None)
    )
    if deciding is None:
        return _before_training(inputs)
    best, *others = deciding.of_one_budget
    errors = tuple(_error(inputs, deciding, best, other) for other in others)
    critical = inputs.critical if deciding.source == COMPARISON else 2.0
    standings = tuple(_standing(best, other, error, critical) for other, error in zip(others, errors, strict=True))
    return Verdict(
        inputs.table.num_heads,
        inputs.table.measure,
        best,
        deciding,
        tuple(others),
        standings,
        errors,
        _covered(inputs, best),
        critical=critical,
    )


def _before_training(inputs: ReportInputs) -> Verdict:
    """Return the verdict on layouts that have only been proposed, or on the table alone."""
    table = inputs.table
    best = widest_layout(inputs)
    if best is None:
        return Verdict(table.num_heads, table.measure, summary=_mean(table))
    proposed = {
        name: Result(name, math.nan, num_global=layout.num_global, mask=layout.global_mask)
        for name, layout in inputs.layouts.items()
    }
    others = tuple(
        result
        for name, result in sorted(proposed.items(), key=lambda item: -inputs.covered[item[0]])
        if name != best and result.num_global == proposed[best].num_global
    )
    unknown = (UNKNOWN,) * len(others), (math.nan,) * len(others)
    return Verdict(table.num_heads, table.measure, proposed[best], None, others, *unknown, covered=inputs.covered[best])


def _mean(table: HeadScores) -> str:
    """Return a sentence on a table without layouts."""
    if table.is_density:
        return f"On average, the {table.num_heads} KV heads keep {100 * table.mean:.1f} % of the tokens."
    measure, (layer, head) = table.measure, np.unravel_index(int(table.values.argmax()), table.grid)
    return (
        f"Of {table.num_heads} KV heads, KV head {head} of layer {layer} has the highest {measure.noun}: "
        f"{measure.exact(table.values[layer, head])} {measure.unit}."
    )


def _error(inputs: ReportInputs, evidence: Evidence, best: Result, other: Result) -> float:
    """Return the standard error of the difference of two layouts, which share documents; NaN if unknown."""
    return inputs.pair_error(best.name, other.name) if evidence.source == COMPARISON else math.nan


def _standing(best: Result, other: Result, error: float, critical: float) -> str:
    """Compare a layout with the best by the error of their difference; both share documents."""
    difference = other.delta - best.delta
    if math.isnan(error) or math.isnan(difference):
        return UNKNOWN
    return TIED if difference <= critical * error else BEHIND


def _covered(inputs: ReportInputs, result: Result) -> float | None:
    """Return the coverage of a layout, in [0, 1]; None if its heads are unknown."""
    if result.mask is None:
        return None
    return coverage(inputs.table, Layout.from_mask(result.mask, window=DEFAULT_WINDOW))
