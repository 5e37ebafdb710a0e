"""Recommend one layout at the end of a search: the best that it found, or the best start if nothing beats that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.statistics import critical_errors, effective_number
from spkv_nas.evaluation.paired import PairedDifference
from spkv_nas.evaluation.trust import MIN_DOCUMENTS
from spkv_nas.search.trials import Trial, best_start

if TYPE_CHECKING:  # importing it at run time requires Optuna
    from spkv_nas.search.driver import Search


@dataclass(frozen=True)
class Recommendation:
    """The layout to take, named after its trial, and why."""

    layout: Layout
    reason: str


def recommend(search: Search, trials: Sequence[Trial]) -> Recommendation | None:
    """Return the layout to take; None if a search without starts has too few documents to rank its layouts.

    A layout beats the start if the whole 95 % interval of their paired difference is below 0. It is measured after full
    retraining, on documents that the search did not use, where the start was retrained, too. With a second objective,
    only layouts that cost no more than the start compete.
    """
    evaluator, start = search.evaluator, best_start(trials, search.starts)
    tokens, number = evaluator.evaluation_tokens, evaluator.num_selection_documents
    # Do not rank by few documents
    if number < MIN_DOCUMENTS:
        reason = f"{number} documents are too few to rank layouts (at least {MIN_DOCUMENTS}): search on more text"
        return None if start is None else Recommendation(_named(start), f"{reason}; {start.name} is the best start")
    # Choose the best other layout by what is most like deployment: retrained in full, else not retrained
    known = set() if start is None else {layout.content_hash for layout in search.starts.values()}
    others = [
        trial for trial in trials if trial.layout.content_hash not in known and search.space.contains(trial.layout)
    ]
    if start is not None and start.cost is not None:
        others = [trial for trial in others if trial.cost is not None and trial.cost <= start.cost]
    retrained = [trial for trial in others if trial.full is not None]
    is_fair = bool(retrained) and (tokens > 0).sum() >= MIN_DOCUMENTS and (start is None or start.full is not None)
    pool = retrained if is_fair else others
    if not pool:
        return (
            None if start is None else Recommendation(_named(start), f"the search found nothing besides {start.name}")
        )
    best = min(pool, key=lambda trial: (trial.short if is_fair and trial.short else trial.zero_shot).percent)
    num_layouts = len(known | {trial.layout.content_hash for trial in others})
    where = f"on the {number} documents that selected it among {num_layouts} layouts, without training"
    if is_fair:
        where = f"after full retraining, on {(tokens > 0).sum()} documents that selected nothing"
    if start is None:
        return Recommendation(_named(best), f"{best.name} has the lowest NLL {where}")
    # Compare it with the start, paired by document
    pair = [best.layout], start.layout
    (change,) = evaluator.retrained("full", *pair) if is_fair else evaluator.score(*pair)
    errors = critical_errors(effective_number(tokens) if is_fair else number)
    if change.percent + errors * change.standard_error < 0:
        return Recommendation(_named(best), f"{best.name} beats {start.name}, the best start: {_text(change)} {where}")
    return Recommendation(
        _named(start), f"nothing beat {start.name}, the best start; {best.name}: {_text(change)} {where}"
    )


def _named(trial: Trial) -> Layout:
    """Return the layout of a trial under the trial's name."""
    return replace(trial.layout, strategy=trial.name)


def _text(change: PairedDifference) -> str:
    """Format a change of NLL with its standard error."""
    return f"{change.percent:+.3f} ± {change.standard_error:.3f} % of NLL"
