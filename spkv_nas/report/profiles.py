"""Compute the small tables behind the report's charts: score by domain, density by position, coverage by budget."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.proposal.coverage import coverage_curve
from spkv_nas.proposal.registry import STRATEGIES


def domain_profile(table: HeadScores) -> pd.DataFrame:
    """Return one row per domain, with its name and the mean over heads."""
    means = {str(domain): float(table.domain_density(domain, signed=True).mean()) for domain in table.domains}
    return pd.DataFrame({"domain": list(means), "mean": list(means.values())})


def position_profile(table: HeadScores) -> pd.DataFrame | None:
    """Return density over heads by token position; None if it was not recorded.

    Its columns are start, end, mean, low and high (10th and 90th percentile of heads).
    """
    if table.positions is None or table.positions.empty:
        return None
    buckets = table.positions.groupby(["start", "end"], sort=True)["density"]
    quantiles = buckets.quantile(np.array([0.1, 0.9])).unstack()
    profile = pd.DataFrame({"mean": buckets.mean(), "low": quantiles[0.1], "high": quantiles[0.9]})
    return profile.reset_index()


def coverage_by_budget(table: HeadScores) -> pd.DataFrame | None:
    """Return coverage in [0, 1] by budget: columns budget, densest, random, and each pattern of whole layers.

    The patterns spend whole layers, so they are NaN at other budgets. None if no head keeps anything.
    """
    if table.mean == 0.0:
        return None
    curve = coverage_curve(table)
    total = table.density.sum()
    for pattern in (strategy for strategy in STRATEGIES if strategy.whole_layers):
        curve[pattern.name] = math.nan
        for layers in range(1, table.num_layers + 1):
            mask = pattern.choose(table, layers * table.num_kv_heads)
            curve.loc[layers * table.num_kv_heads - 1, pattern.name] = table.density[mask].sum() / total
    return curve
