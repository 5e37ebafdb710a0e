"""What the guidance of a search was worth, and how well cheap measures foretold the retraining, from its table."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.search_table import BASELINE
from spkv_nas.evaluation.ranking import rank_correlation

_MILESTONES = (10, 20, 50, 100, 200, 500, 1000)


def best_layouts(rows: pd.DataFrame, number: int) -> pd.DataFrame:
    """The first ``number`` distinct layouts by full retraining, then short, then zero-shot."""
    rungs = ["full_delta_percent", "short_delta_percent", "zero_shot_delta_percent"]
    return rows.drop_duplicates("hash").sort_values(rungs).head(number)


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
    """What each sampler reached: by trials (mean over seeds), by seed, and after full retraining.

    Of its layouts that were retrained in full, without the baselines, the one that the short retraining calls the best
    counts: it was chosen on other text than it is judged on.
    """
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
    known = rows.loc[rows["sampler"] == BASELINE, "hash"]
    for sampler, some in rows.groupby("sampler", sort=False):
        own = some if sampler == BASELINE else some[~some["hash"].isin(known)]
        retrained = own.dropna(subset="full_delta_percent").sort_values("short_delta_percent")
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


def _rounded(value: Any) -> float:
    return float(f"{float(value):.5g}")
