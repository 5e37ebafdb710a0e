"""Test a mean after every sample, with an error rate that holds however often one looks (anytime-valid inference).

Evidence against a hypothesis is an e-process: non-negative, and at most 1 in expectation at every stopping time if the
hypothesis is true. By Ville's inequality it ever reaches 1 / risk with a probability of at most ``risk``.

The e-process here is the capital of a gambler who bets that samples are larger than the hypothesis says (Waudby-Smith
and Ramdas 2024, "Estimating means of bounded random variables by betting", arXiv 2010.09686; their package ``confseq``
has no wheels). It is exact for samples with a known lower bound. Samples without one are bounded by those before them
(``bounds_so_far``), which is exact as long as none exceeds its bound; ``reports/verdict.py`` measures the error rate on
real and on heavy-tailed samples.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spkv_nas.base.statistics import FEW_DOCUMENTS

Float = NDArray[np.float64]

# Bets as shares of the largest one that cannot lose more than everything, and the capital put on each. Large bets win
# fastest where samples hardly vary, as where two models give equal answers, so they get the most capital.
_BETS = 2.0 ** (-0.5 * np.arange(16))
_CAPITAL = 0.75 ** np.arange(16) / (0.75 ** np.arange(16)).sum()
_REACH = 2.0  # assumed bound of the next sample, in multiples of the largest one so far


def betting_log_e(samples: Float, bounds: ArrayLike) -> Float:
    """Return the evidence against "the mean is at most 0" after each sample, by betting: its logarithm, [..., n].

    log sum_k w_k prod_i max(0, 1 + b_k x_i / B_i): a mixture of bets b_k that are constant shares of the largest
    one (grid Kelly, section B of the paper). Given the earlier ones, each of the samples x [..., n] has the mean of the
    hypothesis. No sample is below -B; the bounds B, above 0, may depend on earlier samples, and infinity places no bet.
    """
    share = samples / np.asarray(bounds, dtype=np.float64)
    with np.errstate(divide="ignore"):  # the largest bet loses everything at its bound
        capital = np.log1p(np.maximum(share[..., None] * _BETS, -1.0)).cumsum(-2)
    from scipy.special import logsumexp  # scipy takes too long for --help

    evidence: Float = logsumexp(capital, axis=-1, b=_CAPITAL)
    return evidence


def bounds_so_far(samples: Float, sizes: Float) -> Float:
    """Return a bound for each sample [..., n] from those before it: twice the largest absolute one.

    It is infinite until there are ``FEW_DOCUMENTS`` earlier samples: no bet rests on fewer. Their effective number
    follows from their positive ``sizes`` [..., n], such as the NLL of documents.
    """
    earlier, bounds = slice(None, -1), np.full(samples.shape, np.inf)
    largest = np.maximum.accumulate(np.abs(samples), -1)[..., earlier]
    number = sizes.cumsum(-1)[..., earlier] ** 2 / (sizes**2).cumsum(-1)[..., earlier]
    bounds[..., 1:] = np.where((number >= FEW_DOCUMENTS) & (largest > 0.0), _REACH * largest, np.inf)
    return bounds


def anytime_p(log_e: Float) -> Float:
    """Return p-values valid at any stopping time, 1 / largest e-value so far, from log e-values [..., n]."""
    p: Float = np.exp(-np.maximum.accumulate(np.maximum(log_e, 0.0), axis=-1))
    return p


def holm(p_values: Sequence[float], risk: float) -> list[bool]:
    """Return which hypotheses are rejected, so that any is wrongly with a probability of at most ``risk``.

    Holm's step-down test. With anytime-valid p-values it holds at any stopping time, whatever their dependence: the
    smallest of all true hypotheses is ever at most risk / their number with a probability of at most ``risk``.
    """
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        if p_values[index] > risk / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
