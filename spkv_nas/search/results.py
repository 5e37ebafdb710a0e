"""What a search found: its table, its front, and the files that it leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import BASELINE, COLUMNS
from spkv_nas.base.files import write_atomic
from spkv_nas.base.version import environment
from spkv_nas.evaluation.guidance import best_so_far, correlations, guidance
from spkv_nas.evaluation.paired import PairedDifference
from spkv_nas.proposal.coverage import coverage, provenance
from spkv_nas.report.study_figures import write_study_figures
from spkv_nas.search.driver import Search
from spkv_nas.search.trials import Trial, first_front


def result_table(trials: Sequence[Trial], table: DensityTable) -> pd.DataFrame:
    """One row per trial, columns ``COLUMNS``; what was not measured is NaN. ``heads`` has a word per layer."""
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
        for rung in ("zero_shot", "short", "full"):
            change: PairedDifference | None = getattr(trial, rung)
            row[f"{rung}_delta_percent"] = math.nan if change is None else change.percent
            row[f"{rung}_standard_error"] = math.nan if change is None else change.standard_error
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def front(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that no other beats in every objective of the zero-shot rung, distinct, the lowest NLL first."""
    distinct = list({trial.layout.content_hash: trial for trial in reversed(trials)}.values())
    return [distinct[index] for index in first_front(np.array([trial.values for trial in distinct]))]


def write_results(search: Search, trials: Sequence[Trial], folder: Path, layouts: Path) -> pd.DataFrame:
    """Write ``search.csv``, ``search.yaml`` and figures to ``folder``, the layouts worth keeping to ``layouts``."""
    table, plan = search.space.table, search.plan
    rows = result_table(trials, table)
    write_atomic(folder / "search.csv", rows.to_csv(index=False, float_format="%.6g"))
    chosen_on, judged_on = search.num_tokens
    summary = {
        "probe": table.name,
        "tau": round(table.tau, 4),
        "budget": list(search.space.budgets),
        "window": search.space.window,
        "constraints": dict(search.space.constraints.named),
        "objectives": ["nll", *([search.cost.name] if search.cost else [])],
        "trials": plan.trials,
        "seeds": list(plan.seeds),
        "tokens": {"chosen_on": chosen_on, "judged_on": judged_on},
        "steps": {"short": search.short_steps, "full": search.recipe.branch.steps},
        "samplers": guidance(rows),
        "rank_correlation": correlations(rows),
        "recipe": search.recipe.model_dump(mode="json"),
        "environment": environment(),
    }
    write_atomic(folder / "search.yaml", yaml.safe_dump(summary, sort_keys=False, allow_unicode=True))
    write_study_figures(folder, rows, best_so_far(rows), None if search.cost is None else search.cost.name)
    kept = {trial.name: trial for trial in (*front(trials), *(t for t in trials if t.full is not None))}
    for name, trial in kept.items():
        if trial.sampler != BASELINE:
            origin = provenance(table, trial.layout, search.space.budgets[1], trial.seed)
            Layout(trial.layout.heads, trial.layout.window, name, origin).write(layouts / f"{name}.yaml")
    for stale in layouts.glob("*.yaml"):
        if stale.stem not in kept:
            stale.unlink(missing_ok=True)  # another worker may have
    return rows
