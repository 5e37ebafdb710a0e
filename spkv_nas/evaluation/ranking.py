"""How well one measure of layouts orders them as another does: Spearman's rank correlation, with its uncertainty."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata, spearmanr

NUM_RESAMPLES = 2000


def rank_correlation(one: ArrayLike, other: ArrayLike) -> dict[str, Any] | None:
    """Spearman's rho of two measures [layouts]: keys rho, p_value, layouts, interval.

    ``interval`` is the 95 % percentile interval over resamples of the layouts (with replacement, fixed seed; those in
    which a measure is constant are left out). Over a handful of layouts it is wide, and says so. None where rho is not
    defined: fewer than three layouts with both measures, or a constant one.
    """
    pairs = np.stack([np.asarray(one, dtype=float), np.asarray(other, dtype=float)])
    pairs = pairs[:, np.isfinite(pairs).all(0)]
    number = pairs.shape[1]
    if number < 3 or (np.ptp(pairs, axis=1) == 0).any():
        return None
    result = spearmanr(*pairs)
    drawn = np.random.default_rng(0).integers(number, size=(NUM_RESAMPLES, number))
    ranks = rankdata(pairs[:, drawn], axis=2)
    ranks -= ranks.mean(2, keepdims=True)
    spread = np.sqrt((ranks**2).sum(2).prod(0))
    rhos = ranks.prod(0).sum(1)[spread > 0] / spread[spread > 0]
    return {
        "rho": round(float(result.statistic), 4),
        "p_value": round(float(result.pvalue), 4),
        "layouts": number,
        "interval": [round(float(bound), 4) for bound in np.percentile(rhos, [2.5, 97.5])],
    }
