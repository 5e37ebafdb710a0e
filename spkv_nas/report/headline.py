"""The report's first sentences: the best layout by the longest retraining on the page, how sure, what it is worth."""

from __future__ import annotations

import math

from spkv_nas.report.evidence import Evidence, Result, all_evidence
from spkv_nas.report.inputs import Inputs
from spkv_nas.report.words import above_full

_RIVALS = ("densest", "interleaved-last", "interleaved-first")  # what is asked first: density itself, layer patterns
_MOST_NAMED = 4


def best_evidence(inputs: Inputs) -> Evidence | None:
    """The longest retraining of several layouts of one budget, or else of one; None before any."""
    retrained = [one for one in all_evidence(inputs) if one.steps != 0]
    return next((one for one in retrained if len(one.of_one_budget) > 1), next(iter(retrained), None))


def headline(inputs: Inputs) -> list[str]:
    """Sentences on the best layout; none without a search: the comparison's own (``findings``) then say it all."""
    evidence = None if inputs.search is None else best_evidence(inputs)
    if evidence is None or len(results := evidence.of_one_budget) < 2:
        return []
    best = results[0]
    said = (
        f"{best.name} has the lowest NLL of {len(results)} layouts with {best.num_global} of {inputs.table.num_heads} "
        f"KV heads global, {evidence.how}: {above_full(best.delta, best.error)}."
    )
    return [said, _certainty(best, results[1:]), *_worth(best, results[1:])]


def _certainty(best: Result, others: tuple[Result, ...]) -> str:
    unknown = [other for other in others if math.isnan(best.error_against(other))]
    if unknown:
        return f"The next, {others[0].name}, is {_behind(best, others[0])}; no standard error is known of their order."
    open_to = [other for other in others if other.delta - best.delta <= 2 * best.error_against(other)]
    spread = "the spread between training runs is not in these errors"
    if not open_to:
        return (
            f"It is clearly ahead: the next, {others[0].name}, is {_behind(best, others[0])}, more than two combined "
            f"standard errors (one is {best.error_against(others[0]):.3f}); {spread}."
        )
    named = [f"{other.name} ({other.delta - best.delta:+.3f})" for other in open_to[:_MOST_NAMED]]
    named += [f"{len(open_to) - _MOST_NAMED} more"] if len(open_to) > _MOST_NAMED else []
    return (
        f"Too close to call, at less than two combined standard errors, are {', '.join(named)} percentage points; "
        f"{spread}."
    )


def _worth(best: Result, others: tuple[Result, ...]) -> list[str]:
    by_name = {other.name: other for other in others}
    rivals = [by_name[name] for name in _RIVALS if name in by_name]
    if not rivals:
        return []
    lost = [
        f"{rival.name} {rival.delta - best.delta:.3f}"
        + ("" if math.isnan(error := best.error_against(rival)) else f" ± {error:.3f}")
        for rival in rivals
    ]
    return [f"More is lost, in percentage points, by {', '.join(lost)}."]


def _behind(best: Result, other: Result) -> str:
    return f"{other.delta - best.delta:.3f} percentage points behind"
