"""Draw one conclusion from all evidence on a page: the layout it is about, and how sure that is.

Headline, tags, the explorer's first layout and the recommended command come from it, so none contradicts another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.artifacts.measurement import displacement_words
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

    # the first sentence in three parts; the second is the layout's name, "" without one
    lead: tuple[str, str, str]
    # what was measured on too little, and how the layout compares with others
    sentences: tuple[str, ...] = ()
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
        if self.evidence is None or self.layout is None or not self.has_rivals:
            return ""
        if self.evidence.source != source:
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
    everything = all_evidence(inputs)
    warnings = _too_few_documents(everything)
    judged = _judged(everything)
    passing = [result for result in judged if result.answer == "passes"]
    # Conclude from retrained layouts; without any, from scores, unless a layout passes
    deciding = _deciding(everything, is_trained=True)
    if deciding is None and not passing:
        deciding = _deciding(everything, is_trained=False)
    if deciding is not None:
        return _of_losses(inputs, deciding, judged, warnings)
    # Conclude from the smallest layout that passes, and what else was measured of it
    if judged:
        best = min(passing or judged, key=lambda result: result.share)
        source = next(mode for mode in everything if best in mode.results)
        return _answer(inputs, best, source, (*warnings, *_of_others(best, everything)))
    if not inputs.layouts:
        return _of_scores(inputs.table, warnings)
    name = _most_covered(inputs)
    return _about(inputs, layout_result(inputs, inputs.layouts[name], math.nan), None, warnings)


def _of_losses(
    inputs: ReportInputs,
    deciding: Evidence,
    judged: Sequence[Result],
    warnings: tuple[str, ...],
) -> Verdict:
    """Return the verdict on the layout of lowest loss, with what verdicts measured of it without retraining."""
    best, *others = deciding.of_one_budget
    remarks = []
    if deciding.steps == 0:
        remarks = [_of_verdict(result) for result in judged if result.key == best.key]
    return _about(inputs, best, deciding, (*warnings, *remarks), others)


def _most_covered(inputs: ReportInputs) -> str:
    """Return the name of the layout of highest coverage at the most frequent budget."""
    budgets = pd.Series({name: layout.num_global for name, layout in inputs.layouts.items()})
    names = [str(name) for name in budgets[budgets == budgets.mode().max()].index]
    return max(names, key=lambda name: np.nan_to_num(inputs.covered[name]))


def _too_few_documents(everything: Sequence[Evidence]) -> tuple[str, ...]:
    """Return a sentence for each source that measured several layouts on too few documents to rank them."""
    small = {
        (mode.source, mode.documents)
        for mode in everything
        if not mode.is_rankable and len(mode.results) > 1
    }
    return tuple(
        f"The {source} measured on {documents}, too few to rank layouts; "
        f"at least {MIN_DOCUMENTS} are needed."
        for source, documents in sorted(small)
    )


def _deciding(everything: Sequence[Evidence], *, is_trained: bool) -> Evidence | None:
    """Return the first evidence of several layouts of one budget, else the first of any; None if there is none.

    Verdicts, and several layouts on too few documents, do not count.
    """
    modes = []
    for mode in everything:
        is_small = not mode.is_rankable and len(mode.results) != 1
        if mode.source != VERDICT and not is_small and (mode.steps != 0) == is_trained:
            modes.append(mode)
    several = [mode for mode in modes if len(mode.of_one_budget) > 1]
    return next(iter((*several, *modes)), None)


def _of_scores(table: HeadScores, warnings: tuple[str, ...]) -> Verdict:
    """Return the verdict of a page without layouts: the mean score."""
    measure = table.measure
    mean = f"{measure.scale.factor * table.mean:.1f}, in {measure.shown}"
    sentence = f"The mean {measure.noun} of {table.num_heads} KV heads is {mean}."
    return Verdict((sentence, "", ""), warnings)


def _judged(everything: Sequence[Evidence]) -> list[Result]:
    """Return the layouts of the verdicts that stand, or without any of those that others have replaced since."""
    verdicts = [mode for mode in everything if mode.source == VERDICT]
    standing = [mode for mode in verdicts if not mode.is_earlier] or verdicts
    return [result for mode in standing for result in mode.results]


def _answer(
    inputs: ReportInputs, layout: Result, evidence: Evidence, remarks: tuple[str, ...]
) -> Verdict:
    """State in one line what one verdict measured of a layout: memory, loss, by what, on how much, and the answer."""
    first = layout.measured[0]
    memory = first.memory
    if not memory:  # an older record
        memory = f"{100 * layout.share:.1f} % of the KV cache at {inputs.context:,} tokens"
    text = with_minus(f": {memory}; {_losses(layout)}.")
    heads = f"{layout.num_global:.0f} of {inputs.table.num_heads} KV heads are global."
    if layout.reach:
        windows = layout.reach.removeprefix("windows ")
        heads += f" Local heads see their last keys, by letter: {windows}."
    heads += f" The loss is against {without_folder(first.against)}, without retraining."
    heads += "".join(f" {each}." for each in displacement_words(layout.measured))
    return Verdict(("", layout.name, text), (heads, *remarks), layout, evidence)


def _losses(result: Result) -> str:
    """Return the loss of a layout by each criterion of one verdict, and what the verdict concluded."""
    return "; ".join(
        f"{measured.criterion} {measured.finding}; {measured.conclusion}"
        for measured in result.measured
    )


def _of_verdict(result: Result, *, is_earlier: bool = False) -> str:
    """Return what one verdict measured of a layout, as a sentence."""
    verdict = "an earlier verdict" if is_earlier else "a verdict"
    memory = f"{result.measured[0].memory}, " if result.measured[0].memory else ""
    return with_minus(f"By {verdict}, {memory}{_losses(result)}.")


def _of_others(layout: Result, everything: Sequence[Evidence]) -> tuple[str, ...]:
    """Return a sentence for each other measurement of a layout without retraining, each from one result."""
    sentences = []
    for evidence in everything:
        for result in evidence.results:
            if evidence.steps != 0 or result is layout or result.key != layout.key:
                continue
            if evidence.source == VERDICT:
                sentences.append(_of_verdict(result, is_earlier=evidence.is_earlier))
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
        heads = f"{layout.num_global:.0f} of {table.num_heads} KV heads global"
        reach = f"{layout.reach}, " if layout.reach else ""
        saved = 100 * (1 - layout.share)
        size = f"{heads}, {reach}{saved:.1f} % less KV cache at {inputs.context:,} tokens; "
    covered = None
    if layout.mask is not None:
        covered = coverage(table, Layout.from_mask(layout.mask, window=DEFAULT_WINDOW))
    # Conclude on a layout that was only proposed
    if evidence is None:
        enough = " on enough documents" if warnings else ""
        lead = ("", layout.name, f": {size}its loss has not been measured{enough}.")
        if covered is not None:
            held = f"its global heads have {100 * covered:.1f} % of the sum over all heads"
            warnings += (
                (
                    f"It was proposed by {table.measure.noun}: {held}, "
                    "which says nothing of the loss yet."
                ),
            )
        return Verdict(lead, warnings, layout, covered=covered)
    # Compare a layout that was measured with the others
    close = _close(inputs, layout, evidence, others)
    sentences = list(warnings)
    if others:
        sentences.append(_competition(evidence, len(others), list(close.values())))
    return Verdict(
        ("", layout.name, f": {size}{_loss(layout, evidence)}."),
        tuple(sentences),
        layout=layout,
        evidence=evidence,
        has_rivals=bool(others),
        close=tuple(close),
        covered=covered,
    )


def _close(
    inputs: ReportInputs, layout: Result, evidence: Evidence, others: Sequence[Result]
) -> dict[str, str]:
    """Return the others that are not clearly behind, by name, with the difference ± its standard error in words.

    The error is that of the difference where documents are shared; where it is NaN, it is at most the sum of both.
    """
    close = {}
    for other in others:
        error = math.nan
        if evidence.source == COMPARISON:
            error = inputs.pair_error(layout.name, other.name)
        largest = layout.error + other.error if math.isnan(error) else error
        behind = other.delta - layout.delta
        # A difference or an error that is NaN shows nothing
        if not behind > evidence.critical * largest:
            close[other.name] = f"{other.name} {signed(behind)} ± {number(error, 3)}"
    return close


def _loss(layout: Result, evidence: Evidence) -> str:
    """Return the layout's measured change of NLL in words, or its NLL, and how it was measured."""
    if not math.isnan(layout.delta):
        error = "" if math.isnan(layout.error) else f" ± {number(layout.error, 3)}"
        value = f"NLL {signed(layout.delta)}{error} % against {BASELINES[evidence.baseline]}"
    elif not math.isnan(layout.nll):
        value = f"NLL {number(layout.nll, 4)} nats per token"
    else:
        value = "NLL not measured"
    documents = f", on {evidence.documents}" if evidence.documents else ""
    return f"{value}, {evidence.description}{documents}"


def _competition(evidence: Evidence, num_others: int, close: Sequence[str]) -> str:
    """Return how the layout compares with the others of its budget, of which ``close`` are not clearly behind."""
    has_several = any(result.reach for result in evidence.of_one_budget)
    budget = "as much memory" if has_several else "as many global heads"
    total = f"{1 + num_others} layouts with {budget}"
    margin = "two standard errors"
    if evidence.critical != 2.0:
        margin = f"{evidence.critical:.1f} standard errors (few documents)"
    runs = ""
    if evidence.steps != 0:
        runs = " None of these errors includes the variation between training runs."
    if not close:
        return (
            f"It has the lowest NLL of {total}: the others are behind by more than {margin}.{runs}"
        )
    return (
        f"No single best of {total}: it is measured lowest; "
        f"not behind by more than {margin} of the difference, in percentage points: "
        f"{listed(close, _MAX_NAMED)}.{runs}"
    )
