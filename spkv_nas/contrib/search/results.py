"""Write the results of a search: its table, its record, the layouts worth keeping, and the one to take."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pandas as pd

from spkv_nas.artifacts import head_scores, histogram
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import ALARM, ResultTable, inputs_of
from spkv_nas.artifacts.search_table import BASELINE, COLUMNS, FIDELITIES, Retraining
from spkv_nas.artifacts.selection import SELECTION, digest
from spkv_nas.base import progress, statistics
from spkv_nas.base.replace import replacing
from spkv_nas.contrib.search.space import Trial, best_start, first_front
from spkv_nas.evaluation import paired, ranking
from spkv_nas.evaluation.ranking import MIN_DOCUMENTS
from spkv_nas.proposal.coverage import coverage, provenance

if TYPE_CHECKING:  # importing it at run time requires Optuna
    from spkv_nas.contrib.search.driver import Search


def result_table(trials: Sequence[Trial], table: head_scores.HeadScores) -> pd.DataFrame:
    """Tabulate the trials with columns ``COLUMNS``; unmeasured values are NaN, ``heads`` has a word per layer."""
    rows = []
    for trial in trials:
        row: dict[str, Any] = {
            "name": trial.name,
            "sampler": trial.sampler,
            "seed": trial.seed,
            "trial": trial.number,
            "hash": trial.layout.hash,
            "num_global": trial.layout.num_global,
            "coverage_percent": 100 * coverage(table, trial.layout),
            "cost": math.nan if trial.cost is None else trial.cost,
            "heads": " ".join(trial.layout.heads),
        }
        # Add the change of NLL at every fidelity
        for fidelity in FIDELITIES:
            change = trial.change(fidelity) or paired.PairedDifference(math.nan, math.nan)
            row |= {f"{fidelity}_delta_percent": change.percent, f"{fidelity}_standard_error": change.standard_error}
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def front(trials: Sequence[Trial]) -> list[Trial]:
    """Return the distinct trials on the Pareto front of the zero-shot objectives, lowest NLL first."""
    distinct = list({trial.layout.content_hash: trial for trial in reversed(trials)}.values())
    return [distinct[index] for index in first_front(np.array([trial.values for trial in distinct]))]


def write_results(
    search: Search, trials: Sequence[Trial], folder: Path, layouts: Path, reporter: progress.Reporter = progress.SILENT
) -> tuple[pd.DataFrame, str | None, Recommendation | None]:
    """Write ``search.csv`` and ``search.yaml`` to ``folder``, and the layouts worth keeping to ``layouts``.

    Return the table, a sentence if its numbers make no sense (else None), and the layout to take, if any.
    """
    rows = result_table(trials, search.space.table)
    alarm = search.evaluator.alarm([trial.zero_shot for trial in trials])
    recommended = recommend(search, trials) if alarm is None else None
    # Write table and record, and the documents that layouts were measured on
    measured = [fidelity for fidelity in FIDELITIES if rows[f"{fidelity}_delta_percent"].notna().any()]
    selection = frozenset[str]().union(*map(search.evaluator.documents, measured))
    # The result depends on these inputs besides the number of trials
    space, evaluator = search.space, search.evaluator
    inputs = {
        "identity": evaluator.identity,
        "recipe": dict(evaluator.settings),
        "probe": space.table.content_hash,
        "layouts": [list(space.budgets), space.window, space.sinks, dict(space.constraints.named)],
        "objective": None if search.cost is None else search.cost.name,
        "seed": search.effort.seed,
        "steps": [evaluator.steps("short"), evaluator.steps("full")],
    }
    record = {"inputs": inputs_of(inputs), ALARM: alarm, **_origin(search, rows), SELECTION: digest(selection)}
    earlier = ResultTable("search").write(folder, rows, record, reporter, selection)
    # Replace the layouts worth keeping: the front, those retrained in full, and the recommended one
    worth_keeping = (*front(trials), *(trial for trial in trials if trial.full is not None))
    kept = {trial.name: (trial.layout, trial.seed) for trial in worth_keeping if trial.sampler != BASELINE}
    if recommended is not None:
        kept[recommended.layout.strategy] = recommended.layout, search.effort.seed
    if earlier is not None and layouts.is_dir():
        shutil.copytree(layouts, layouts.with_name(f"{layouts.name}-{earlier}"), dirs_exist_ok=True)
    with replacing(layouts, stale=[file.name for file in layouts.glob("*.yaml")]) as new:
        for name, (layout, seed) in kept.items():
            origin = provenance(search.space.table, layout, search.space.budgets[1], seed)
            replace(layout, strategy=name, provenance=origin).write(new / f"{name}.yaml")
    return rows, alarm, recommended


def _origin(search: Search, rows: pd.DataFrame) -> dict[str, Any]:
    """Return the content of ``search.yaml``: settings, effort, and rank correlations."""
    space, effort, evaluator = search.space, search.effort, search.evaluator
    # Find the fidelities at which layouts, and thus the control, were retrained
    retrained = [fidelity for fidelity in get_args(Retraining) if rows[f"{fidelity}_delta_percent"].notna().any()]
    return {
        "probe": space.table.name,
        "tau": histogram.rounded_tau(space.table.tau),
        "budget": list(space.budgets),
        "window": space.window,
        **({"sinks": space.sinks} if space.sinks else {}),
        "constraints": dict(space.constraints.named),
        "objectives": ["nll", *([search.cost.name] if search.cost else [])],
        "trials": effort.trials,
        "seeds": [effort.seed],
        "tokens": {"chosen_on": evaluator.num_selection_tokens, "judged_on": int(evaluator.evaluation_tokens.sum())},
        "documents": {"chosen_on": evaluator.num_selection_documents},
        "num_documents": int((evaluator.evaluation_tokens > 0).sum()),
        "effective_documents": round(statistics.effective_number(evaluator.evaluation_tokens), 1),
        "control": {fidelity: vars(evaluator.control(fidelity)) for fidelity in retrained},
        "steps": {"short": evaluator.steps("short"), "full": evaluator.steps("full")},
        "sampler": effort.sampler,
        "rank_correlation": ranking.correlations(rows),
        "recipe": dict(evaluator.settings),
    }


@dataclass(frozen=True)
class Recommendation:
    """The layout to take, named after its trial, and why."""

    layout: Layout
    reason: str


def recommend(search: Search, trials: Sequence[Trial]) -> Recommendation | None:
    """Return the layout to take; None without starts if documents are too few to rank, or without any layout.

    A layout beats the start if the whole 95 % interval of their paired difference is below 0, after full retraining on
    documents that the search did not use, where there is any. None may cost more than the start.
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
    others = [each for each in trials if each.layout.content_hash not in known and search.space.contains(each.layout)]
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
    errors = statistics.critical_errors(statistics.effective_number(tokens) if is_fair else number)
    if change.percent + errors * change.standard_error < 0:
        verb, to_do = ("beats", "") if is_fair else ("scores lower than", "; retrain it to confirm that")
        reason = f"{best.name} {verb} {start.name}, the best start: {_text(change)} {where}{to_do}"
        return Recommendation(_named(best), reason)
    reason = f"{best.name} does not beat {start.name}, the best start: {_text(change)} {where}"
    return Recommendation(_named(start), reason)


def _named(trial: Trial) -> Layout:
    return replace(trial.layout, strategy=trial.name)


def _text(change: paired.PairedDifference) -> str:
    return f"{change.percent:+.3f} ± {change.standard_error:.3f} % of NLL"
