"""Suggest heads by TPE: those that good layouts have more often than the others.

The tree-structured Parzen estimator (Bergstra et al. 2011) as implemented in Optuna 5 with ``multivariate=False``:
every head is an independent parameter. With two choices, G and L, kernels, mixtures and best candidates have a closed
form for all heads at once; Optuna handles 640 parameters one after the other, which takes seconds (reports/LOG.md).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from spkv_nas.search.trials import first_front

Float = NDArray[np.float64]

_GOOD, _MOST_GOOD = 0.1, 25  # share of layouts that count as good; their maximum with one objective
_CANDIDATES = 24  # candidates drawn from the good layouts' density; the one of highest ratio is suggested
_RECENT = 25  # latest layouts with weight 1; earlier ones weigh less


def suggest_mask(masks: NDArray[np.bool_], values: Float, generator: np.random.Generator) -> NDArray[np.bool_]:
    """Suggest the heads [H] to make global next.

    Args:
        masks: [N, H], layouts so far, in order; N at least 1.
        values: [N, objectives], lower is better.
        generator: source of randomness.
    """
    # Estimate the probability of G among good layouts and among the others, [H]
    is_good = good_ones(values)
    weights = np.ones(is_good.sum()) if values.shape[1] > 1 else _weights(int(is_good.sum()))
    good_share = share_global(masks[is_good], weights)
    other_share = share_global(masks[~is_good], _weights(int((~is_good).sum())))
    # Draw whether one of the candidates has the letter of the higher density ratio
    prefers_global = good_share > other_share  # G has the higher ratio of densities, good / others
    probability = (
        1 - (1 - np.where(prefers_global, good_share, 1 - good_share)) ** _CANDIDATES
    )  # probability that some candidate has it
    suggested: NDArray[np.bool_] = prefers_global == (generator.random(prefers_global.shape) < probability)
    return suggested


def good_ones(values: Float) -> NDArray[np.bool_]:
    """Return a mask [N] of the best tenth of values [N, objectives], taken by successive Pareto fronts.

    The last front is thinned evenly if it does not fit.
    """
    num_good = math.ceil(_GOOD * len(values))
    is_good = np.zeros(len(values), bool)
    if values.shape[1] == 1:
        is_good[np.argsort(values[:, 0], kind="stable")[: min(num_good, _MOST_GOOD)]] = True
    while is_good.sum() < num_good and values.shape[1] > 1:
        remaining = np.flatnonzero(~is_good)
        front = remaining[first_front(values[remaining])]
        positions = np.linspace(0, len(front) - 1, min(len(front), num_good - int(is_good.sum())))
        is_good[front[positions.round().astype(int)]] = True
    return is_good


def share_global(masks: NDArray[np.bool_], weights: Float) -> Float:
    """Return the mixture probability [H] of G, from a kernel around each of ``masks`` [N, H] and a uniform one."""
    kernel = 1 / (len(masks) + 1)  # unnormalised mass per letter, on top of 1 for the layout's own
    kernel_share = (masks + kernel) / (1 + 2 * kernel)
    share: Float = (weights @ kernel_share + 0.5) / (weights.sum() + 1)
    return share


def _weights(num_layouts: int) -> Float:
    """Return the weights [N] of layouts in order, lower for early ones."""
    num_early = max(0, num_layouts - _RECENT)
    return np.append(np.linspace(1 / max(1, num_layouts), 1, num_early), np.ones(num_layouts - num_early))
