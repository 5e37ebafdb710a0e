"""Draw one conclusion from all evidence on a page: the layout it is about, and how sure that is.

Headline, tags, the explorer's first layout and the recommended command come from it, so none contradicts another.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.evaluation.ranking import MIN_DOCUMENTS
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report.evidence import COMPARISON, PASSES, VERDICT, Evidence, Result, all_evidence, layout_result
from spkv_nas.report.formatting import BASELINES, listed, number, signed
from spkv_nas.report.inputs import ReportInputs

_MAX_NAMED = 4
NOT_BEHIND = "not clearly behind"


@dataclass(frozen=True)
class Step:
    """A recommended command, and what it does."""

    purpose: str
    command: str


@dataclass(frozen=True, eq=False)
class Verdict:
    """The conclusion from all evidence on a page."""

    lead: tuple[str, str, str]  # the first sentence in three parts; the second is the layout's name, "" without one
    sentences: tuple[str, ...] = ()  # what was measured on too little, and how the layout compares with others
    layout: Result | None = None  # the layout that the page is about, as ``conclude`` chooses it; None if there is none
    evidence: Evidence | None = None  # the evidence that decided; None if no loss was measured
    has_rivals: bool = False  # whether other layouts of the same budget were measured
    close: tuple[str, ...] = ()  # names of those that are not clearly behind
    covered: float | None = None  # coverage of the layout, in [0, 1]; None if its heads are unknown

    def tag(self, name: str, source: str, steps: float | None = None) -> str:
        """Return a short label for a layout's row in a table; "" where the verdict does not apply.

        ``source`` is ``COMPARISON`` or ``SEARCH``; ``steps`` are the row's, if the rows of its table differ in them.
        """
        if self.evidence is None or self.layout is None or self.evidence.source != source or not self.has_rivals:
            return ""
        if steps is not None and not np.isclose(steps, self.evidence.steps, equal_nan=True):
            return ""
        if name == self.layout.name and not self.close:
            return "lowest NLL"
        return NOT_BEHIND if name in (self.layout.name, *self.close) else ""


def conclude(inputs: ReportInputs) -> Verdict:
    """Return the verdict on everything that a page shows.

    What was retrained longest decides, by several layouts of one budget if there are any; before retraining, the
    smallest layout that passes a verdict, else scores, else coverage. Fewer than ``MIN_DOCUMENTS`` decide nothing.
    """
    if inputs.alarm is not None:
        return Verdict((f"Warning: {inputs.alarm}", "", ""))
    # Leave out what was measured on too few documents
    everything = all_evidence(inputs)
    small = {(each.source, each.documents) for each in everything if not each.is_rankable and len(each.results) > 1}
    warnings = tuple(
        f"The {source} measured on {documents}, too few to rank layouts; at least {MIN_DOCUMENTS} are needed."
        for source, documents in sorted(small)
    )
    rankable = [each for each in everything if each.is_rankable or len(each.results) == 1]
    decided = {result.key: result for each in everything if each.source == VERDICT for result in each.results}
    passing = [result for result in decided.values() if result.verdict.startswith(PASSES)]
    # Retrained layouts; without any, scores, unless a layout passes
    for is_trained in (True, False)[: 1 if passing else 2]:
        group = [each for each in rankable if (each.steps != 0) == is_trained and each.source != VERDICT]
        deciding = next((each for each in group if len(each.of_one_budget) > 1), next(iter(group), None))
        if deciding is not None:
            best, *others = deciding.of_one_budget
            return _about(inputs, best, deciding, decided, warnings, others)
    # A layout that passes, with its score where there is one
    if decided:
        best = min(passing or decided.values(), key=lambda result: result.share)
        measured = [(each, result) for each in everything for result in each.results if result.key == best.key]
        scores = [pair for pair in measured if pair[0] in rankable and pair[0].steps == 0]
        of_verdict = next(pair for pair in measured if pair[1] is best)
        source, scored = min(scores, key=lambda pair: pair[0].source == VERDICT, default=of_verdict)
        return _about(inputs, scored, source, decided, warnings)
    # Without layouts, the scores
    if not inputs.layouts:
        table, measure = inputs.table, inputs.table.measure
        mean = f"{measure.scale.factor * table.mean:.1f}, in {measure.shown}"
        return Verdict((f"The mean {measure.noun} of {table.num_heads} KV heads is {mean}.", "", ""), warnings)
    # A layout that was only proposed: that of the highest coverage, at the most frequent budget
    budgets = pd.Series({name: layout.num_global for name, layout in inputs.layouts.items()})
    candidates = map(str, budgets[budgets == budgets.mode().max()].index)
    name = max(candidates, key=lambda name: np.nan_to_num(inputs.covered[name]))
    return _about(inputs, layout_result(inputs, inputs.layouts[name], math.nan), None, decided, warnings)


def _about(
    inputs: ReportInputs,
    layout: Result,
    evidence: Evidence | None,
    decided: Mapping[object, Result],
    warnings: tuple[str, ...],
    others: Sequence[Result] = (),
) -> Verdict:
    """Say how much memory a layout saves, what it loses, and how ``others`` of its budget compare.

    ``decided`` are the layouts of verdicts by ``Result.key``, which count before retraining.
    """
    # Compute the saved memory and the coverage
    table, size = inputs.table, ""
    if not math.isnan(layout.num_global):
        reach = f"{layout.reach}, " if layout.reach else ""
        saving = f"{reach}{100 * (1 - layout.share):.1f} % less KV cache at {inputs.context:,} tokens"
        size = f"{layout.num_global:.0f} of {table.num_heads} KV heads global, {saving}; "
    covered = None
    if layout.mask is not None:
        covered = coverage(table, Layout.from_mask(layout.mask, window=DEFAULT_WINDOW))
    # Conclude on a layout that was only proposed
    if evidence is None:
        loss = f"its loss has not been measured{' on enough documents' if warnings else ''}"
        if covered is not None:
            held = f"its global heads have {100 * covered:.1f} % of the sum over all heads"
            warnings += (f"It was proposed by {table.measure.noun}: {held}, which says nothing of the loss yet.",)
        return Verdict(("", layout.name, f": {size}{loss}."), warnings, layout, covered=covered)
    # State the loss, and what a verdict says of the layout
    loss = _loss(layout, evidence)
    if evidence.steps == 0 and layout.key in decided:
        loss += f"; {decided[layout.key].verdict}"
    # Find the others that are not clearly behind, by the error of the difference where documents are shared; where it
    # is NaN, it is at most the sum of both errors
    close = {}
    for other in others:
        error = inputs.pair_error(layout.name, other.name) if evidence.source == COMPARISON else math.nan
        largest = layout.error + other.error if math.isnan(error) else error
        if not other.delta - layout.delta > evidence.critical * largest:
            close[other.name] = f"{other.name} {signed(other.delta - layout.delta)} ± {number(error, 3)}"
    words = (_competition(evidence, len(others), [*close.values()]),) if others else ()
    lead = "", layout.name, f": {size}{loss}."
    return Verdict(lead, (*warnings, *words), layout, evidence, bool(others), tuple(close), covered)


def _loss(layout: Result, evidence: Evidence) -> str:
    """Return the layout's measured change of NLL in words, or its NLL, and how it was measured."""
    value = "NLL not measured" if math.isnan(layout.nll) else f"NLL {number(layout.nll, 4)} nats per token"
    if not math.isnan(layout.delta):
        error = "" if math.isnan(layout.error) else f" ± {number(layout.error, 3)}"
        value = f"NLL {signed(layout.delta)}{error} % against {BASELINES[evidence.baseline]}"
    return f"{value}, {evidence.description}" + (f", on {evidence.documents}" if evidence.documents else "")


def _competition(evidence: Evidence, num_others: int, close: Sequence[str]) -> str:
    """Return how the layout compares with the others of its budget, of which ``close`` are not clearly behind."""
    has_several = any(result.reach for result in evidence.of_one_budget)
    total = f"{1 + num_others} layouts with {'as much memory' if has_several else 'as many global heads'}"
    critical = evidence.critical
    margin = "two standard errors" if critical == 2.0 else f"{critical:.1f} standard errors (few documents)"
    runs = " None of these errors includes the variation between training runs." if evidence.steps != 0 else ""
    if not close:
        return f"It has the lowest NLL of {total}: the others are behind by more than {margin}.{runs}"
    return (
        f"No single best of {total}: it is measured lowest; not behind by more than {margin} of the difference, in "
        f"percentage points: {listed(close, _MAX_NAMED)}.{runs}"
    )
