"""What a search found: its table, what the guidance was worth, how well cheap measures foretold the retraining."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from spkv_nas.density import DensityTable
from spkv_nas.evaluation.nll import PairedDifference
from spkv_nas.evaluation.ranking import rank_correlation
from spkv_nas.files import write_atomic
from spkv_nas.layout import Layout
from spkv_nas.layout_search import BASELINE, Search, Trial, ranked
from spkv_nas.report.study_figures import write_study_figures
from spkv_nas.search.coverage import coverage, provenance
from spkv_nas.workspace import environment

COLUMNS = (
    "name",
    "sampler",
    "seed",
    "trial",
    "hash",
    "num_global",
    "coverage_percent",
    "cost",
    "zero_shot_delta_percent",
    "zero_shot_standard_error",
    "short_delta_percent",
    "short_standard_error",
    "full_delta_percent",
    "full_standard_error",
    "heads",
)
_MILESTONES = (10, 20, 50, 100, 200, 500, 1000)


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


def best_so_far(rows: pd.DataFrame) -> pd.DataFrame:
    """How good each study was after each trial: columns sampler, seed, trials, quality.

    ``quality`` is the lowest zero-shot ΔNLL so far; with a cost, the share of the box around all trials that the front
    so far leaves on its good side (hypervolume, the higher the better).
    """
    tried = rows[rows["sampler"] != BASELINE]
    has_cost = tried["cost"].notna().all() and len(tried) > 0
    values = tried[["zero_shot_delta_percent", "cost"]].to_numpy() if has_cost else None
    box = None if values is None else (values.min(0), values.max(0))
    found = []
    for (sampler, seed), study in tried.groupby(["sampler", "seed"], sort=False):
        ordered = study.sort_values("trial")
        if box is None:
            quality = np.minimum.accumulate(ordered["zero_shot_delta_percent"].to_numpy())
        else:
            points = ordered[["zero_shot_delta_percent", "cost"]].to_numpy()
            quality = np.array([hypervolume(points[: count + 1], *box) for count in range(len(points))])
        found += [(sampler, seed, number, value) for number, value in enumerate(quality, 1)]
    return pd.DataFrame(found, columns=["sampler", "seed", "trials", "quality"])


def hypervolume(points: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> float:
    """Share of the box from ``low`` to ``high`` [2] in which some of ``points`` [n, 2] is at least as good."""
    size = np.where(high > low, high - low, 1.0)
    scaled = (points - low) / size
    area, floor = 0.0, 1.0
    for first, second in scaled[np.lexsort((scaled[:, 1], scaled[:, 0]))]:
        if second < floor:
            area += (1.0 - first) * (floor - second)
            floor = float(second)
    return float(area)


def guidance(rows: pd.DataFrame) -> dict[str, Any]:
    """What each sampler reached: by trials (mean over seeds), by seed, and the best layout after full retraining."""
    curve = best_so_far(rows)
    summary: dict[str, Any] = {}
    for sampler, some in curve.groupby("sampler", sort=False):
        last = int(some["trials"].max())
        counts = sorted({*(count for count in _MILESTONES if count < last), last})
        means = some.groupby("trials")["quality"].mean()
        final = some[some["trials"] == last]["quality"]
        summary[str(sampler)] = {
            "after_trials": {count: _rounded(means[count]) for count in counts},
            "by_seed": [_rounded(value) for value in final],
            "standard_error": _rounded(final.std(ddof=1) / math.sqrt(len(final))) if len(final) > 1 else None,
        }
    for sampler, some in rows.groupby("sampler", sort=False):
        retrained = some.dropna(subset="full_delta_percent").sort_values("full_delta_percent")
        if not retrained.empty:
            best = retrained.iloc[0]
            summary.setdefault(str(sampler), {})["retrained"] = {
                "layout": str(best["name"]),
                "delta_nll_percent": _rounded(best["full_delta_percent"]),
                "standard_error": _rounded(best["full_standard_error"]),
            }
    return summary


def correlations(rows: pd.DataFrame) -> dict[str, dict[str, Any] | None]:
    """Rank correlations over distinct layouts: of cheap measures with the full retraining, and with each other."""
    layouts = rows.drop_duplicates("hash")
    pairs = {
        "coverage and full": ("coverage_percent", "full_delta_percent"),
        "zero-shot and full": ("zero_shot_delta_percent", "full_delta_percent"),
        "short and full": ("short_delta_percent", "full_delta_percent"),
        "coverage and zero-shot": ("coverage_percent", "zero_shot_delta_percent"),
    }
    return {name: rank_correlation(layouts[one], layouts[other]) for name, (one, other) in pairs.items()}


def front(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that no other beats in every objective of the zero-shot rung, distinct, the lowest NLL first."""
    distinct = list({trial.layout.content_hash: trial for trial in reversed(trials)}.values())
    values = np.array([trial.values for trial in distinct])
    chosen = []
    for index in ranked(values):
        row = values[index]
        if any((values[other] <= row).all() and (values[other] < row).any() for other in range(len(values))):
            break
        chosen.append(distinct[index])
    return chosen


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
            stale.unlink()
    return rows


def _rounded(value: Any) -> float:
    return float(f"{float(value):.5g}")
