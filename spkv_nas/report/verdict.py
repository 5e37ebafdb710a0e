"""Draw one conclusion from all evidence on a page: the layout it is about, and how sure that is.

The headline, the figures at the top, the tags in tables, the explorer's initial layout, its file and the recommended
command all come from one ``Verdict``, so that they cannot contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.proposal.coverage import coverage
from spkv_nas.report.evidence import COMPARISON, MIN_DOCUMENTS, PASSES, VERDICT, Evidence, Result, all_evidence
from spkv_nas.report.formatting import BASELINES, listed, number, signed, standard_errors
from spkv_nas.report.inputs import ReportInputs, widest_layout

_MAX_NAMED = 4
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

    lead: tuple[str, str, str]  # the first sentence in three parts; the second is the layout's name, "" without one
    sentences: tuple[str, ...] = ()  # what was measured on too little, and how the layout compares with others
    layout: Result | None = None  # the layout that the page is about, as ``conclude`` chooses it; None if there is none
    evidence: Evidence | None = None  # the evidence that decided; None if no loss was measured
    others: tuple[Result, ...] = ()  # the other layouts of the same budget, in order
    standings: tuple[str, ...] = ()  # of the others, ``TIED``, ``BEHIND`` or ``UNKNOWN`` (``_standing``)
    covered: float | None = None  # coverage of the layout, in [0, 1]; None if its heads are unknown

    def tag(self, name: str, source: str, steps: float | None = None) -> str:
        """Return a short label for a layout's row in a table; "" where the verdict does not apply.

        ``source`` is ``COMPARISON`` or ``SEARCH``; ``steps`` are the row's, if the rows of its table differ in them.
        """
        if self.evidence is None or self.layout is None or self.evidence.source != source or not self.others:
            return ""
        if steps is not None and not np.isclose(steps, self.evidence.steps, equal_nan=True):
            return ""
        close = [other.name for other, standing in zip(self.others, self.standings, strict=True) if standing != BEHIND]
        if name == self.layout.name and not close:
            return "lowest NLL"
        return NOT_BEHIND if name in (self.layout.name, *close) else ""


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
    judged = {result.key: result for each in everything if each.source == VERDICT for result in each.results}
    passing = [result for result in judged.values() if result.judged.startswith(PASSES)]
    # Retrained layouts; without any, scores, unless a layout passes
    for is_trained in (True, False)[: 1 if passing else 2]:
        group = [each for each in rankable if (each.steps != 0) == is_trained and each.source != VERDICT]
        deciding = next((each for each in group if len(each.of_one_budget) > 1), next(iter(group), None))
        if deciding is not None:
            best, *others = deciding.of_one_budget
            return _about(inputs, best, deciding, judged, warnings, others)
    # A layout that passes, with its score where there is one
    if judged:
        best = min(passing or judged.values(), key=lambda result: result.num_global)
        having = [each for each in everything if any(result.key == best.key for result in each.results)]
        scores = [each for each in having if each in rankable and each.steps == 0]
        judging = next(each for each in having if any(result is best for result in each.results))
        source = min(scores, key=lambda each: each.source == VERDICT, default=judging)
        scored = next(result for result in source.results if result.key == best.key)
        return _about(inputs, scored, source, judged, warnings)
    # A layout that was only proposed
    name = widest_layout(inputs)
    if name is None:
        return Verdict((_mean(inputs.table), "", ""), warnings)
    layout = inputs.layouts[name]
    proposed = Result(name, math.nan, num_global=layout.num_global, mask=layout.global_mask)
    return _about(inputs, proposed, None, judged, warnings)


def _about(
    inputs: ReportInputs,
    layout: Result,
    evidence: Evidence | None,
    judged: Mapping[object, Result],
    warnings: tuple[str, ...],
    others: Sequence[Result] = (),
) -> Verdict:
    """Return a verdict about a layout: how much memory it saves, what it loses, and how others of its budget compare.

    ``judged`` is what verdicts say of layouts, by ``Result.key``, which counts before retraining.
    """
    # Compute the saved memory and the coverage
    table, size = inputs.table, ""
    if not math.isnan(layout.num_global):
        share = 100 * (1 - inputs.cache_share(min(1.0, layout.num_global / table.num_heads)))
        saving = f"{share:.1f} % less KV cache at {inputs.context:,} tokens"
        size = f"{layout.num_global:.0f} of {table.num_heads} KV heads global, {saving}; "
    covered = None
    if layout.mask is not None:
        covered = coverage(table, Layout.from_mask(layout.mask, window=DEFAULT_WINDOW))
    # Conclude on a layout that was only proposed
    if evidence is None:
        loss = f"its loss has not been measured{' on enough documents' if warnings else ''}"
        sentences = (
            f"It was proposed by {table.measure.noun}: its global heads have {100 * (covered or 0.0):.1f} % of the sum "
            "over all heads, which says nothing of the loss yet.",
        )
        return Verdict(("", layout.name, f": {size}{loss}."), (*warnings, *sentences), layout, covered=covered)
    # State the loss, and what a verdict says of the layout
    loss = _loss(layout, evidence)
    if evidence.steps == 0 and layout.key in judged:
        loss += f"; {judged[layout.key].judged}"
    # Standard errors of differences from the others, which share documents in a comparison
    is_paired = evidence.source == COMPARISON
    errors = [inputs.pair_error(layout.name, other.name) if is_paired else math.nan for other in others]
    standings = tuple(
        _standing(layout, other, error, evidence.critical) for other, error in zip(others, errors, strict=True)
    )
    close = [
        f"{other.name} {signed(other.delta - layout.delta)} ± {number(error, 3)}"
        for other, error, standing in zip(others, errors, standings, strict=True)
        if standing != BEHIND
    ]
    words = (_competition(evidence, len(others), close),) if others else ()
    lead = "", layout.name, f": {size}{loss}."
    return Verdict(lead, (*warnings, *words), layout, evidence, tuple(others), standings, covered)


def _loss(layout: Result, evidence: Evidence) -> str:
    """Return the layout's measured change of NLL in words, or its NLL, and how it was measured."""
    value = "NLL not measured" if math.isnan(layout.nll) else f"NLL {number(layout.nll, 4)} nats per token"
    if not math.isnan(layout.delta):
        error = "" if math.isnan(layout.error) else f" ± {number(layout.error, 3)}"
        value = f"NLL {signed(layout.delta)}{error} % against {BASELINES[evidence.baseline]}"
    return f"{value}, {evidence.description}" + (f", on {evidence.documents}" if evidence.documents else "")


def _competition(evidence: Evidence, num_others: int, close: Sequence[str]) -> str:
    """Return how the layout compares with the others of its budget, of which ``close`` are not clearly behind."""
    total, margin = f"{1 + num_others} layouts with as many global heads", standard_errors(evidence.critical)
    runs = " None of these errors includes the variation between training runs." if evidence.steps != 0 else ""
    if not close:
        return f"It has the lowest NLL of {total}: the others are behind by more than {margin}.{runs}"
    return (
        f"No single best of {total}: it is measured lowest; not behind by more than {margin} of the difference, in "
        f"percentage points: {listed(close, _MAX_NAMED)}.{runs}"
    )


def _standing(best: Result, other: Result, error: float, critical: float) -> str:
    """Compare a layout with the best by the standard error of their difference: tied within ``critical`` of them.

    Where that is unknown, it is at most the sum of both errors, by which a layout may still be clearly behind.
    """
    difference = other.delta - best.delta
    if math.isnan(error):
        return BEHIND if difference > critical * (best.error + other.error) else UNKNOWN
    if math.isnan(difference):
        return UNKNOWN
    return TIED if difference <= critical * error else BEHIND


def _mean(table: HeadScores) -> str:
    """Return a sentence on a table without layouts."""
    if table.is_density:
        return f"On average, the {table.num_heads} KV heads keep {100 * table.mean:.1f} % of the tokens."
    measure, (layer, head) = table.measure, np.unravel_index(int(table.values.argmax()), table.grid)
    return (
        f"Of {table.num_heads} KV heads, KV head {head} of layer {layer} has the highest {measure.noun}: "
        f"{measure.exact(table.values[layer, head])} {measure.unit}."
    )
