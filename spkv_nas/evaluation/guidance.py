"""Measure, from a search's table, the benefit of guidance and how well cheap measures predict full retraining."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.search_table import BASELINE, FIDELITIES, whole_scores
from spkv_nas.evaluation.ranking import rank_correlation

_MILESTONES = (10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class RetrainedLayout:
    """A layout after full retraining, and its change of NLL in percent."""

    layout: str
    delta_nll_percent: float
    standard_error: float


@dataclass(frozen=True)
class SamplerSummary:
    """Search results of one sampler.

    Attributes:
        after_trials: mean quality (``best_so_far``) over seeds by number of trials; empty for the baselines.
        by_seed: final quality of each study.
        standard_error: standard error over seeds of the last mean; None for a single seed.
        retrained: the layout that counts; None if none was retrained in full.
    """

    after_trials: dict[int, float] = field(default_factory=dict)
    by_seed: list[float] = field(default_factory=list)
    standard_error: float | None = None
    retrained: RetrainedLayout | None = None

    def as_mapping(self) -> dict[str, Any]:
        """Return the mapping that is written to ``search.yaml``."""
        studies = {name: getattr(self, name) for name in ("after_trials", "by_seed", "standard_error")}
        return {
            **(studies if self.after_trials else {}),
            **({} if self.retrained is None else {"retrained": vars(self.retrained)}),
        }


def best_layouts(rows: pd.DataFrame, number: int = 12) -> pd.DataFrame:
    """Return the best ``number`` distinct layouts by full, then short retraining, then zero-shot; none stopped."""
    columns = [f"{fidelity}_delta_percent" for fidelity in reversed(FIDELITIES)]
    return whole_scores(rows).drop_duplicates("hash").sort_values(columns).head(number)


def best_so_far(rows: pd.DataFrame) -> pd.DataFrame:
    """Compute how good each study was after each trial: columns sampler, seed, trials, quality.

    ``quality`` is the lowest zero-shot ΔNLL so far. With a cost it is the hypervolume of the front so far: the share of
    the bounding box of all trials that the front dominates (higher is better).
    """
    trials = rows[rows["sampler"] != BASELINE]
    has_cost = trials["cost"].notna().all() and len(trials) > 0
    values = trials[["zero_shot_delta_percent", "cost"]].to_numpy() if has_cost else None
    box = None if values is None else (values.min(0), values.max(0))
    records = []
    # Accumulate the best value or the hypervolume over the trials of each study
    for (sampler, seed), study in trials.groupby(["sampler", "seed"], sort=False):
        ordered = study.sort_values("trial")
        if box is None:
            quality = np.minimum.accumulate(ordered["zero_shot_delta_percent"].to_numpy())
        else:
            points = ordered[["zero_shot_delta_percent", "cost"]].to_numpy()
            quality = np.array([hypervolume(points[: count + 1], *box) for count in range(len(points))])
        records += [(sampler, seed, number, value) for number, value in enumerate(quality, 1)]
    return pd.DataFrame(records, columns=["sampler", "seed", "trials", "quality"])


def hypervolume(points: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> float:
    """Return the share of the box from ``low`` to ``high`` [2] that ``points`` [n, 2] dominate (lower is better)."""
    size = np.where(high > low, high - low, 1.0)
    scaled = (points - low) / size
    area, lowest = 0.0, 1.0
    # Add the strip that each non-dominated point contributes
    for first, second in scaled[np.lexsort((scaled[:, 1], scaled[:, 0]))]:
        if second < lowest:
            area += (1.0 - first) * (lowest - second)
            lowest = float(second)
    return float(area)


def guidance(rows: pd.DataFrame) -> dict[str, SamplerSummary]:
    """Summarize each sampler by name: the samplers in order, then the baselines if they were retrained.

    Of a sampler's fully retrained layouts, without the baselines, the one with the best short retraining counts: it was
    chosen on other text than it is evaluated on.
    """
    summaries = {str(sampler): _summary(study) for sampler, study in best_so_far(rows).groupby("sampler", sort=False)}
    baselines = rows.loc[rows["sampler"] == BASELINE, "hash"]
    for sampler, trials in rows.groupby("sampler", sort=False):
        candidates = trials if sampler == BASELINE else trials[~trials["hash"].isin(baselines)]
        retrained = candidates.dropna(subset="full_delta_percent").sort_values("short_delta_percent")
        if not retrained.empty:
            best = retrained.iloc[0]
            change, error = _rounded(best["full_delta_percent"]), _rounded(best["full_standard_error"])
            earlier = summaries.get(str(sampler), SamplerSummary())
            summaries[str(sampler)] = replace(earlier, retrained=RetrainedLayout(str(best["name"]), change, error))
    return summaries


def _summary(curve: pd.DataFrame) -> SamplerSummary:
    """Summarize the trials of one sampler, given its rows of ``best_so_far``."""
    last = int(curve["trials"].max())
    counts = sorted({*(count for count in _MILESTONES if count < last), last})
    means = curve.groupby("trials")["quality"].mean()
    final = curve[curve["trials"] == last]["quality"]
    return SamplerSummary(
        after_trials={count: _rounded(means[count]) for count in counts},
        by_seed=[_rounded(value) for value in final],
        standard_error=_rounded(final.std(ddof=1) / math.sqrt(len(final))) if len(final) > 1 else None,
    )


def correlations(rows: pd.DataFrame) -> dict[str, dict[str, Any] | None]:
    """Compute rank correlations over distinct layouts: of cheap measures with full retraining, and with each other."""
    layouts = rows.drop_duplicates("hash")
    pairs = {
        "coverage and full": ("coverage_percent", "full_delta_percent"),
        "zero-shot and full": ("zero_shot_delta_percent", "full_delta_percent"),
        "short and full": ("short_delta_percent", "full_delta_percent"),
        "coverage and zero-shot": ("coverage_percent", "zero_shot_delta_percent"),
    }
    return {
        name: rank_correlation(layouts[column], layouts[other_column]) for name, (column, other_column) in pairs.items()
    }


def _rounded(value: Any) -> float:
    """Round to five significant digits."""
    return float(f"{float(value):.5g}")
