"""Draw one conclusion from all evidence on a page: the layout it is about, and how sure that is.

The headline, the figures at the top, the tags in tables, the explorer's initial layout, its file and the recommended
command all come from one ``Verdict``, so that they cannot contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.artifacts.score_kind import Measure
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report.evidence import COMPARISON, MIN_DOCUMENTS, PASSES, VERDICT, Evidence, Result, all_evidence
from spkv_nas.report.formatting import BASELINES, listed, number, signed, standard_errors
from spkv_nas.report.inputs import ReportInputs, widest_layout

_MAX_NAMED = 4
_RUNS = "None of these errors includes the variation between training runs."
TIED, UNKNOWN, BEHIND = "tied", "unknown", "behind"  # standing of a layout relative to the best
NOT_BEHIND = "not clearly behind"


@dataclass(frozen=True)
class Step:
    """A recommended command, and what it does."""

    purpose: str
    command: str


Advise = Callable[["Verdict"], Sequence[Step]]


@dataclass(frozen=True, eq=False)
class Verdict:
    """The conclusion from all evidence on a page."""

    num_heads: int  # KV heads of the model
    measure: Measure  # quantity that the table holds
    layout: Result | None = None  # the layout that the page is about, as ``conclude`` chooses it; None if there is none
    evidence: Evidence | None = None  # the evidence that decided; None if no loss was measured
    others: tuple[Result, ...] = ()  # the other layouts of the same budget, in order
    # ``TIED`` (within ``critical`` standard errors of the difference), ``BEHIND`` or ``UNKNOWN``, for each of the
    # others
    standings: tuple[str, ...] = ()
    # standard error of each difference from the best, in percentage points; NaN: unknown
    errors: tuple[float, ...] = ()
    covered: float | None = None  # coverage of the layout, in [0, 1]; None if its heads are unknown
    summary: str = ""  # the first sentence if there is no layout
    critical: float = 2.0  # standard errors on either side of a 95 % interval
    saving: str = ""  # how much less cache the layout takes, in words
    judged: str = ""  # what a verdict says of the layout, such as "passes 1 % (nll)"; "" without one
    warnings: tuple[str, ...] = ()  # sentences on measurements that decide nothing

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
        if self.evidence is None or self.layout is None or self.evidence.source != source or not self.others:
            return ""
        if steps is not None and not np.isclose(steps, self.evidence.steps, equal_nan=True):
            return ""
        if name == self.layout.name:
            return "lowest NLL" if self.is_clear else NOT_BEHIND
        return NOT_BEHIND if self.standing(name) in (TIED, UNKNOWN) else ""

    @cached_property
    def lead(self) -> tuple[str, str, str]:
        """Return the first sentence in three parts; the second is the layout's name, "" without one.

        It says what a user asks: how much memory the layout saves, and what it loses.
        """
        if self.layout is None:
            return self.summary, "", ""
        size = ""
        if not math.isnan(self.layout.num_global):
            size = f"{self.layout.num_global:.0f} of {self.num_heads} KV heads global, {self.saving}; "
        return "", self.layout.name, f": {size}{self._loss}."

    @property
    def sentences(self) -> list[str]:
        """Return the other sentences: what was measured on too little, and how the layout compares with others."""
        return [*self.warnings, *(self._proposed if self.evidence is None else self._competition)]

    @property
    def _loss(self) -> str:
        """Return the layout's measured change of NLL in words, or its NLL, and what a verdict says of it."""
        if self.layout is None or self.evidence is None:
            return f"its loss has not been measured{' on enough documents' if self.warnings else ''}"
        if not math.isnan(self.layout.delta):
            error = "" if math.isnan(self.layout.error) else f" ± {number(self.layout.error, 3)}"
            value = f"NLL {signed(self.layout.delta)}{error} % against {BASELINES[self.evidence.baseline]}"
        elif not math.isnan(self.layout.nll):
            value = f"NLL {number(self.layout.nll, 4)} nats per token"
        else:
            value = "NLL not measured"
        documents = f", on {self.evidence.documents}" if self.evidence.documents else ""
        return f"{value}, {self.evidence.description}{documents}" + (f"; {self.judged}" if self.judged else "")

    @property
    def _competition(self) -> list[str]:
        """Return how the layout compares with the others of its budget."""
        if self.layout is None or not self.others:
            return []
        total, margin = f"{1 + len(self.others)} layouts with as many global heads", standard_errors(self.critical)
        runs = f" {_RUNS}" if self.evidence is not None and self.evidence.steps != 0 else ""
        if self.is_clear:
            return [f"It has the lowest NLL of {total}: the others are behind by more than {margin}.{runs}"]
        close = [
            f"{other.name} {signed(other.delta - self.layout.delta)} ± {number(error, 3)}"
            for other, standing, error in zip(self.others, self.standings, self.errors, strict=True)
            if standing != BEHIND
        ]
        return [
            f"No single best of {total}: it is measured lowest; not behind by more than {margin} of the difference, in "
            f"percentage points: {listed(close, _MAX_NAMED)}.{runs}"
        ]

    @property
    def _proposed(self) -> list[str]:
        """Return what a layout that was only proposed stands on."""
        if self.layout is None or self.covered is None:
            return []
        return [
            f"It was proposed by {self.measure.noun}: its global heads have {100 * self.covered:.1f} % of the sum over "
            "all heads, which says nothing of the loss yet."
        ]


def conclude(inputs: ReportInputs) -> Verdict:
    """Return the verdict on everything that a page shows.

    What was retrained longest decides, by several layouts of one budget if there are any; before retraining, the
    smallest layout that passes a verdict, else scores, else coverage. Fewer than ``MIN_DOCUMENTS`` decide nothing.
    """
    if inputs.alarm is not None:
        return Verdict(inputs.table.num_heads, inputs.table.measure, summary=f"Warning: {inputs.alarm}")
    everything = all_evidence(inputs)
    small = {(each.source, each.documents) for each in everything if not each.is_rankable and len(each.results) > 1}
    warnings = tuple(
        f"The {source} measured on {documents}, too few to rank layouts; at least {MIN_DOCUMENTS} are needed."
        for source, documents in sorted(small)
    )
    rankable = [each for each in everything if each.is_rankable or len(each.results) == 1]
    retrained, untrained = (
        [each for each in rankable if (each.steps != 0) == trained and each.source != VERDICT]
        for trained in (True, False)
    )
    judged = {result.key: result for each in everything if each.source == VERDICT for result in each.results}
    passing = [result for result in judged.values() if result.judged.startswith(PASSES)]
    for group in (retrained, untrained):
        if group is untrained and passing:
            break
        deciding = next((each for each in group if len(each.of_one_budget) > 1), next(iter(group), None))
        if deciding is not None:
            return replace(_lowest(inputs, deciding, judged), warnings=warnings)
    if not judged:
        return replace(_before_training(inputs), warnings=warnings)
    # A layout that passes, with its score where there is one
    best = min(passing or judged.values(), key=lambda result: result.num_global)
    sources = [each for each in rankable if each.steps == 0 and any(result.key == best.key for result in each.results)]
    sources.sort(key=lambda each: each.source == VERDICT)
    source = next(iter(sources), next(each for each in everything if any(result is best for result in each.results)))
    scored = next(result for result in source.results if result.key == best.key)
    return _about(inputs, scored, source, judged, warnings=warnings)


def _about(
    inputs: ReportInputs, result: Result, evidence: Evidence | None, judged: Mapping[object, Result], **fields: Any
) -> Verdict:
    """Return a verdict about a layout, with its memory and, before retraining, what ``judged`` says of it."""
    is_judged = evidence is not None and evidence.steps == 0 and result.key in judged
    saving = "" if math.isnan(result.num_global) else _saving(inputs, result.num_global)
    return Verdict(
        inputs.table.num_heads,
        inputs.table.measure,
        result,
        evidence,
        covered=_covered(inputs, result),
        saving=saving,
        judged=judged[result.key].judged if is_judged else "",
        **fields,
    )


def _lowest(inputs: ReportInputs, evidence: Evidence, judged: Mapping[object, Result]) -> Verdict:
    """Return the verdict on the layout of the lowest NLL among those of one budget."""
    best, *others = evidence.of_one_budget
    errors = tuple(_error(inputs, evidence, best, other) for other in others)
    standings = tuple(
        _standing(best, other, error, evidence.critical) for other, error in zip(others, errors, strict=True)
    )
    fields = {"others": tuple(others), "standings": standings, "errors": errors, "critical": evidence.critical}
    return _about(inputs, best, evidence, judged, **fields)


def _before_training(inputs: ReportInputs) -> Verdict:
    """Return the verdict on layouts that have only been proposed, or on the table alone."""
    best = widest_layout(inputs)
    if best is None:
        return Verdict(inputs.table.num_heads, inputs.table.measure, summary=_mean(inputs.table))
    layout = inputs.layouts[best]
    return _about(inputs, Result(best, math.nan, num_global=layout.num_global, mask=layout.global_mask), None, {})


def _saving(inputs: ReportInputs, num_global: float) -> str:
    """Return how much less cache a number of global heads takes, in words."""
    share = 100 * (1 - inputs.cache_share(min(1.0, num_global / inputs.table.num_heads)))
    return f"{share:.1f} % less KV cache at {inputs.context:,} tokens"


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
    """Compare a layout with the best by the error of their difference.

    Where that is unknown, it is at most the sum of both errors, by which a layout may still be clearly behind.
    """
    difference = other.delta - best.delta
    if math.isnan(error):
        return BEHIND if difference > critical * (best.error + other.error) else UNKNOWN
    if math.isnan(difference):
        return UNKNOWN
    return TIED if difference <= critical * error else BEHIND


def _covered(inputs: ReportInputs, result: Result) -> float | None:
    """Return the coverage of a layout, in [0, 1]; None if its heads are unknown."""
    if result.mask is None:
        return None
    return coverage(inputs.table, Layout.from_mask(result.mask, window=DEFAULT_WINDOW))
