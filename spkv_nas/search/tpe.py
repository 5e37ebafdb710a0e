"""TPE over layouts: wishes for the heads that the good layouts so far have more often than the others.

The tree-structured Parzen estimator (Bergstra et al. 2011) as Optuna 5 has it with ``multivariate=False``: every head
is a parameter of its own. Of two choices, G and L, its kernels, mixtures and best candidates can be written out for all
heads at once; Optuna takes 640 parameters one after the other, for seconds (reports/LOG.md).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from spkv_nas.search.trials import first_front

Float = NDArray[np.float64]

_GOOD, _MOST_GOOD = 0.1, 25  # share of the layouts that count as good; with one objective the most of them
_CANDIDATES = 24  # letters drawn as the good have them, of which the most telling is wanted
_RECENT = 25  # the latest layouts weigh 1, those before the less the earlier


def suggest_mask(masks: NDArray[np.bool_], values: Float, generator: np.random.Generator) -> NDArray[np.bool_]:
    """Heads [H] to make global next.

    Args:
        masks: [N, H], layouts so far, in order; N at least 1.
        values: [N, objectives], the lower the better.
    """
    good = good_ones(values)
    weights = np.ones(good.sum()) if values.shape[1] > 1 else _weights(int(good.sum()))
    likely = share_global(masks[good], weights)
    others = share_global(masks[~good], _weights(int((~good).sum())))
    wants = likely > others  # G has the higher ratio of densities, good to others
    seen = 1 - (1 - np.where(wants, likely, 1 - likely)) ** _CANDIDATES  # that some candidate has the letter wanted
    suggested: NDArray[np.bool_] = wants == (generator.random(wants.shape) < seen)
    return suggested


def good_ones(values: Float) -> NDArray[np.bool_]:
    """[N], the best tenth of values [N, objectives]: front after front, the last in part, from all along it."""
    number = math.ceil(_GOOD * len(values))
    good = np.zeros(len(values), bool)
    if values.shape[1] == 1:
        good[np.argsort(values[:, 0], kind="stable")[: min(number, _MOST_GOOD)]] = True
    while good.sum() < number and values.shape[1] > 1:
        left = np.flatnonzero(~good)
        front = left[first_front(values[left])]
        places = np.linspace(0, len(front) - 1, min(len(front), number - int(good.sum())))
        good[front[places.round().astype(int)]] = True
    return good


def share_global(masks: NDArray[np.bool_], weights: Float) -> Float:
    """[H], the probability of G in a mixture of a kernel around each of ``masks`` [N, H] and one that is even."""
    kernel = 1 / (len(masks) + 1)  # what a kernel gives each letter besides 1 to its own
    inside = (masks + kernel) / (1 + 2 * kernel)
    share: Float = (weights @ inside + 0.5) / (weights.sum() + 1)
    return share


def _weights(number: int) -> Float:
    """[N], of layouts from the first to the latest."""
    early = max(0, number - _RECENT)
    return np.append(np.linspace(1 / max(1, number), 1, early), np.ones(number - early))
