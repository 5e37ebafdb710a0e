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
    """Return the layout to take; None without starts if documents are too few to rank, or without any layout.

    A layout beats the start if the whole 95 % interval of their paired difference is below 0. It is measured after full
    retraining, on documents that the search did not use, where the start was retrained, too. With a second objective,
    only layouts that cost no more than the start compete.
    """
    evaluator, start = search.evaluator, best_start(trials, search.starts)
    tokens, number = evaluator.evaluation_tokens, evaluator.num_selection_documents
    # Do not rank by few documents
    if number < MIN_DOCUMENTS:
        first = next(iter(search.starts.values()), None)
        reason = f"{number} documents are too few to rank layouts (at least {MIN_DOCUMENTS}): search on more text"
        return None if first is None else Recommendation(first, f"{reason}; {first.strategy} is the first start")
    # Select by short retraining among those retrained in full, else by scores; the full result stays unbiased
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
        by = "after short retraining" if is_fair else where
        return Recommendation(_named(best), f"{best.name} has the lowest NLL {by}")
    # Compare it with the start, paired by document
    pair = [best.layout], start.layout
    (change,) = evaluator.retrained("full", *pair) if is_fair else evaluator.score(*pair)
    errors = critical_errors(effective_number(tokens) if is_fair else number)
    if change.percent + errors * change.standard_error < 0:
        verb, to_do = ("beats", "") if is_fair else ("scores lower than", "; retrain it to confirm that")
        reason = f"{best.name} {verb} {start.name}, the best start: {_text(change)} {where}{to_do}"
        return Recommendation(_named(best), reason)
    return Recommendation(
        _named(start), f"{best.name} does not beat {start.name}, the best start: {_text(change)} {where}"
    )


def _named(trial: Trial) -> Layout:
    return replace(trial.layout, strategy=trial.name)


def _text(change: PairedDifference) -> str:
    return f"{change.percent:+.3f} ± {change.standard_error:.3f} % of NLL"
