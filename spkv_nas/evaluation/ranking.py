"""How well one measure of layouts or of heads orders them as another does: Spearman's rank correlation, with its
uncertainty.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np
import pandas as pd
import scipy  # whose statistics are imported when they are used
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 2000
FEWEST = 8  # layouts or heads below which resampling gives no usable interval
_EXACT = 7  # layouts up to which all their orders are counted: 5,040


def rank_correlation(one: ArrayLike, other: ArrayLike) -> dict[str, Any] | None:
    """Spearman's rho of two measures [layouts]: keys rho, p_value, layouts, interval.

    ``p_value`` is two-sided, exact over all orders of up to seven layouts. ``interval`` is that of ``spearman``: None
    below eight layouts, where the exact p-value says all there is to say.
    """
    pairs = _both(one, other)
    found = spearman(*pairs)
    if found is None:
        return None
    rho, interval = found
    number = pairs.shape[1]
    if number <= _EXACT:
        orders = np.array(list(permutations(range(number))))
        p_value = np.mean(np.abs(_rho(np.broadcast_to(pairs[0], orders.shape), pairs[1, orders])) >= abs(rho) - 1e-9)
    else:
        p_value = scipy.stats.spearmanr(*pairs).pvalue
    return {
        "rho": round(rho, 4),
        "p_value": round(float(p_value), 4),
        "layouts": number,
        "interval": None if interval is None else [round(bound, 4) for bound in interval],
    }


def spearman(one: ArrayLike, other: ArrayLike) -> tuple[float, tuple[float, float] | None] | None:
    """Compute Spearman's rho of two measures [items], and its 95 % percentile interval.

    The interval is over resamples of the items (with replacement, fixed seed; those in which a measure is constant are
    left out). It is None below eight items and where rho is 1 or -1: resamples of a perfect order are perfect, so the
    interval would have no width. The result is None where rho is not defined: fewer than three items with both
    measures, or a constant one. Needs nothing that takes long to import.
    """
    pairs = _both(one, other)
    number = pairs.shape[1]
    if number < 3 or (np.ptp(pairs, axis=1) == 0).any():
        return None
    rho = float(_rho(*pairs[:, None])[0])
    if number < FEWEST or abs(rho) > 1 - 1e-9:
        return rho, None
    drawn = np.random.default_rng(0).integers(number, size=(NUM_RESAMPLES, number))
    low, high = np.nanpercentile(_rho(*pairs[:, drawn]), [2.5, 97.5])
    return rho, (float(low), float(high))


def format_rank_correlation(found: Mapping[str, Any]) -> str:
    """Format a result of ``rank_correlation``, such as "-0.60 (4 layouts, exact p = 0.42)"."""
    exact = "exact " if found["layouts"] <= _EXACT else ""
    uncertainty = f"{found['layouts']} layouts, {exact}p = {found['p_value']:.2g}"
    if found["interval"] is not None:
        low, high = found["interval"]
        uncertainty += f", 95 % interval {low:+.2f} to {high:+.2f}"
    return f"{found['rho']:+.2f} ({uncertainty})"


def _both(one: ArrayLike, other: ArrayLike) -> NDArray[np.float64]:
    """[2, items] of the items that have both measures."""
    pairs = np.stack([np.asarray(one, dtype=float), np.asarray(other, dtype=float)])
    return pairs[:, np.isfinite(pairs).all(0)]


def _rho(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spearman's rho of each row of two arrays [rows, items]; NaN where one is constant."""
    ranks = np.stack([pd.DataFrame(each).rank(axis=1).to_numpy() for each in (one, other)])
    ranks -= ranks.mean(2, keepdims=True)
    spread = np.sqrt((ranks**2).sum(2).prod(0))
    rhos: NDArray[np.float64] = np.divide(ranks.prod(0).sum(1), spread, out=np.full(len(one), np.nan), where=spread > 0)
    return rhos
