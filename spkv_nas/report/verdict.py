"""Draw one conclusion from all evidence on a page: the layout it is about, and how sure that is.

Headline, tags, the explorer's first layout and the recommended command come from it, so none contradicts another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.evaluation.ranking import MIN_DOCUMENTS
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report.evidence import (
    COMPARISON,
    VERDICT,
    Evidence,
    Result,
    all_evidence,
    layout_result,
)
from spkv_nas.report.formatting import BASELINES, listed, number, signed, with_minus, without_folder
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

    lead: tuple[
        str, str, str
    ]  # the first sentence in three parts; the second is the layout's name, "" without one
    sentences: tuple[
        str, ...
    ] = ()  # what was measured on too little, and how the layout compares with others
    # The layout that the page is about, as ``conclude`` chooses it; None if there is none
    layout: Result | None = None
    evidence: Evidence | None = None  # the evidence that decided; None if no loss was measured
    has_rivals: bool = False  # whether other layouts of the same budget were measured
    close: tuple[str, ...] = ()  # names of those that are not clearly behind
    covered: float | None = None  # coverage of the layout, in [0, 1]; None if its heads are unknown

    def tag(self, name: str, source: str, steps: float | None = None) -> str:
        """Return a short label for a layout's row in a table; "" where the verdict does not apply.

        ``source`` is ``COMPARISON`` or ``SEARCH``; ``steps`` are the row's, if the rows of its table differ in them.
        """
        if (
            self.evidence is None
            or self.layout is None
            or self.evidence.source != source
            or not self.has_rivals
        ):
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
    small = {
        (each.source, each.documents)
        for each in everything
        if not each.is_rankable and len(each.results) > 1
    }
    warnings = tuple(
        f"The {source} measured on {documents}, too few to rank layouts; at least {MIN_DOCUMENTS} are needed."
        for source, documents in sorted(small)
    )
    rankable = [each for each in everything if each.is_rankable or len(each.results) == 1]
    judged = _judged(everything)
    passing = [result for result in judged if result.answer == "passes"]
    # Retrained layouts; without any, scores, unless a layout passes
    kinds = [True] if passing else [True, False]
    for is_trained in kinds:
        group = [
            each for each in rankable if (each.steps != 0) == is_trained and each.source != VERDICT
        ]
        deciding = next(
            (each for each in group if len(each.of_one_budget) > 1), next(iter(group), None)
        )
        if deciding is not None:
            best, *others = deciding.of_one_budget
            verdicts = (
                []
                if deciding.steps != 0
                else [result for result in judged if result.key == best.key]
            )
            return _about(inputs, best, deciding, (*warnings, *map(_of_verdict, verdicts)), others)
    # The smallest layout that passes, and what else was measured of it
    if judged:
        best = min(passing or judged, key=lambda result: result.share)
        source = next(each for each in everything if best in each.results)
        return _answer(inputs, best, source, (*warnings, *_of_others(best, everything)))
    # Without layouts, the scores
    if not inputs.layouts:
        table = inputs.table
        measure = inputs.table.measure
        mean = f"{measure.scale.factor * table.mean:.1f}, in {measure.shown}"
        return Verdict(
            (f"The mean {measure.noun} of {table.num_heads} KV heads is {mean}.", "", ""), warnings
        )
    # A layout that was only proposed: that of the highest coverage, at the most frequent budget
    budgets = pd.Series({name: layout.num_global for name, layout in inputs.layouts.items()})
    candidates = map(str, budgets[budgets == budgets.mode().max()].index)
    name = max(candidates, key=lambda name: np.nan_to_num(inputs.covered[name]))
    return _about(inputs, layout_result(inputs, inputs.layouts[name], math.nan), None, warnings)


def _judged(everything: Sequence[Evidence]) -> list[Result]:
    """Return the layouts of the verdicts that stand, or without any of those that others have replaced since."""
    verdicts = [each for each in everything if each.source == VERDICT]
    standing = [each for each in verdicts if not each.is_earlier] or verdicts
    return [result for each in standing for result in each.results]


def _answer(
    inputs: ReportInputs, layout: Result, evidence: Evidence, remarks: tuple[str, ...]
) -> Verdict:
    """State in one line what one verdict measured of a layout: memory, loss, by what, on how much, and the answer."""
    memory = layout.measured[0].memory
    if not memory:  # an older record
        memory = f"{100 * layout.share:.1f} % of the KV cache at {inputs.context:,} tokens"
    losses = [f"{each.criterion} {each.finding}; {each.conclusion}" for each in layout.measured]
    lead = "", layout.name, with_minus(f": {memory}; {'; '.join(losses)}.")
    against = without_folder(layout.measured[0].against)
    heads = f"{layout.num_global:.0f} of {inputs.table.num_heads} KV heads are global."
    if layout.reach:
        heads += (
            f" Local heads see their last keys, by letter: {layout.reach.removeprefix('windows ')}."
        )
    heads += f" The loss is against {against}, without retraining."
    return Verdict(lead, (heads, *remarks), layout, evidence)


def _of_verdict(result: Result) -> str:
    """Return what one verdict measured of a layout, as a sentence."""
    memory = f"{result.measured[0].memory}, " if result.measured[0].memory else ""
    losses = "; ".join(
        f"{each.criterion} {each.finding}; {each.conclusion}" for each in result.measured
    )
    return with_minus(f"By a verdict, {memory}{losses}.")


def _of_others(layout: Result, everything: Sequence[Evidence]) -> tuple[str, ...]:
    """Return a sentence for each other measurement of a layout without retraining, each from one result."""
    sentences = []
    for evidence in everything:
        for result in evidence.results:
            if evidence.steps != 0 or result is layout or result.key != layout.key:
                continue
            if evidence.source == VERDICT:
                sentences.append(_of_verdict(result))
            else:
                sentences.append(f"By {evidence.source}: {_loss(result, evidence)}.")
    return tuple(sentences)


def _about(
    inputs: ReportInputs,
    layout: Result,
    evidence: Evidence | None,
    warnings: tuple[str, ...],
    others: Sequence[Result] = (),
) -> Verdict:
    """Say how much memory a layout saves, what it loses, and how ``others`` of its budget compare."""
    # Compute the saved memory and the coverage
    table = inputs.table
    size = ""
    if not math.isnan(layout.num_global):
        reach = f"{layout.reach}, " if layout.reach else ""
        saving = (
            f"{reach}{100 * (1 - layout.share):.1f} % less KV cache at {inputs.context:,} tokens"
        )
        size = f"{layout.num_global:.0f} of {table.num_heads} KV heads global, {saving}; "
    covered = None
    if layout.mask is not None:
        covered = coverage(table, Layout.from_mask(layout.mask, window=DEFAULT_WINDOW))
    # Conclude on a layout that was only proposed
    if evidence is None:
        loss = f"its loss has not been measured{' on enough documents' if warnings else ''}"
        if covered is not None:
            held = f"its global heads have {100 * covered:.1f} % of the sum over all heads"
            warnings += (
                f"It was proposed by {table.measure.noun}: {held}, which says nothing of the loss yet.",
            )
        return Verdict(("", layout.name, f": {size}{loss}."), warnings, layout, covered=covered)
    loss = _loss(layout, evidence)
    # Find the others that are not clearly behind, by the error of the difference where documents are shared; where it
    # is NaN, it is at most the sum of both errors
    close = {}
    for other in others:
        error = (
            inputs.pair_error(layout.name, other.name)
            if evidence.source == COMPARISON
            else math.nan
        )
        largest = layout.error + other.error if math.isnan(error) else error
        if not other.delta - layout.delta > evidence.critical * largest:
            close[other.name] = (
                f"{other.name} {signed(other.delta - layout.delta)} ± {number(error, 3)}"
            )
    words = (_competition(evidence, len(others), [*close.values()]),) if others else ()
    lead = "", layout.name, f": {size}{loss}."
    return Verdict(lead, (*warnings, *words), layout, evidence, bool(others), tuple(close), covered)


def _loss(layout: Result, evidence: Evidence) -> str:
    """Return the layout's measured change of NLL in words, or its NLL, and how it was measured."""
    value = (
        "NLL not measured"
        if math.isnan(layout.nll)
        else f"NLL {number(layout.nll, 4)} nats per token"
    )
    if not math.isnan(layout.delta):
        error = "" if math.isnan(layout.error) else f" ± {number(layout.error, 3)}"
        value = f"NLL {signed(layout.delta)}{error} % against {BASELINES[evidence.baseline]}"
    return f"{value}, {evidence.description}" + (
        f", on {evidence.documents}" if evidence.documents else ""
    )


def _competition(evidence: Evidence, num_others: int, close: Sequence[str]) -> str:
    """Return how the layout compares with the others of its budget, of which ``close`` are not clearly behind."""
    has_several = any(result.reach for result in evidence.of_one_budget)
    total = f"{1 + num_others} layouts with {'as much memory' if has_several else 'as many global heads'}"
    critical = evidence.critical
    margin = (
        "two standard errors"
        if critical == 2.0
        else f"{critical:.1f} standard errors (few documents)"
    )
    runs = (
        " None of these errors includes the variation between training runs."
        if evidence.steps != 0
        else ""
    )
    if not close:
        return (
            f"It has the lowest NLL of {total}: the others are behind by more than {margin}.{runs}"
        )
    return (
        f"No single best of {total}: it is measured lowest; not behind by more than {margin} of the difference, in "
        f"percentage points: {listed(close, _MAX_NAMED)}.{runs}"
    )
