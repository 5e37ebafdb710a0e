"""Standard errors clustered by document, and tests of a mean after every sample; needs no torch.

The error rate of the tests holds however often one looks (anytime-valid inference). Evidence against a hypothesis is an
e-process: non-negative, and at most 1 in expectation at every stopping time if the hypothesis is true. By Ville's
inequality it ever reaches 1 / risk with a probability of at most ``risk``.

The e-process here is the capital of a gambler who bets that samples are larger than the hypothesis says (Waudby-Smith
and Ramdas 2024, "Estimating means of bounded random variables by betting", arXiv 2010.09686; their package ``confseq``
has no wheels). It is exact for samples with a known lower bound. Samples without one are bounded by those before them
(``bounds_so_far``), which is exact as long as none exceeds its bound; ``reports/verdict.py`` measures the error rate on
real and on heavy-tailed samples.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

NORMAL_95 = 1.96  # standard errors on either side of 95 %
FEW_DOCUMENTS = 20  # with fewer clusters, normal intervals are too narrow
_TWO_SIDED = 0.975
Float = NDArray[np.float64]
# Bets as shares of the largest one that cannot lose more than everything, and the capital put on each. Large bets win
# fastest where samples hardly vary, as where two models give equal answers, so they get the most capital.
_BETS = 2.0 ** (-0.5 * np.arange(16))
_LOG_CAPITAL = np.log(0.75 ** np.arange(16) / (0.75 ** np.arange(16)).sum())
_REACH = 2.0  # assumed bound of the next sample, in multiples of the largest one so far


def clustered_error(squares: ArrayLike, clusters: ArrayLike, tokens: ArrayLike) -> Float:
    """Return the standard error of a ratio, sum of values / sum of tokens, clustered by document (ratio estimator).

    sqrt(squares * C / (C - 1)) / tokens, with the ``squares`` the sum over documents of (value - ratio * tokens)^2, C
    the number of documents (``clusters``), and the tokens of all. Arguments broadcast. NaN for fewer than two
    documents.
    """
    number: Any = np.asarray(clusters)
    spread = np.maximum(np.asarray(squares, dtype=np.float64), 0.0)
    freedom = np.maximum(number - 1, 1)
    error = np.sqrt(spread * number / freedom) / np.maximum(tokens, 1)
    return np.where(number > 1, error, np.nan)


def effective_number(sizes: ArrayLike) -> float:
    """Return how many clusters of equal size are as precise: (sum of sizes)^2 / (sum of their squares); 0 for none."""
    number: Float = np.asarray(sizes, dtype=np.float64)
    squares = float((number**2).sum())
    return float(number.sum()) ** 2 / squares if squares > 0 else 0.0


def critical_errors(effective: float) -> float:
    """Return how many standard errors lie on either side of a 95 % interval: 2, or more if there are few documents.

    Below an effective number of ``FEW_DOCUMENTS``, it is the quantile of Student's t with ``effective`` - 1 degrees of
    freedom; NaN counts as many. With ``jackknife_ratio``, the interval covers 92 to 100 % for log-normal document
    lengths (40,000 simulated draws, ``reports/LOG.md``).
    """
    # Takes half a second, which --help and the first line of a command do not need
    from scipy.special import stdtrit

    if not effective < FEW_DOCUMENTS:
        return 2.0
    return float(stdtrit(effective - 1.0, _TWO_SIDED)) if effective > 1.0 else math.inf


def jackknife_ratio(values: Float, bases: Float | NDArray[np.int64]) -> tuple[Float, Float]:
    """Return (sum of values / sum of bases, its standard error) over clusters, both [...], from values [..., clusters].

    sqrt((K - 1) / K * sum((r / (1 - w))^2)) / sum of bases, with r = value - ratio * base, w the cluster's share of the
    bases and K the number of clusters: the linearised delete-one-cluster jackknife (CR3; MacKinnon, Nielsen and Webb
    2023, "Cluster-robust inference: a guide to empirical practice"). Clusters whose base is 0 are left out; the error
    is NaN for fewer than two.
    """
    is_used = bases > 0
    values = values[..., is_used]
    bases = bases[is_used]
    total = bases.sum()
    number = len(bases)
    ratio = values.sum(-1) / total
    if number < 2:
        return ratio, np.full_like(ratio, np.nan)
    residual = (values - ratio[..., None] * bases) / (1.0 - bases / total)
    squares = (residual**2).sum(-1)
    return ratio, np.sqrt((number - 1) / number * squares) / total


def mean_and_error(values: Float) -> tuple[float, float]:
    """Return the mean of samples and its standard error.

    If the samples are shares in [0, 1], or differences of two, and are all equal, their spread is 0, which says nothing
    about other samples. The error is then ``unseen_share`` / 1.96, so that 1.96 errors reach the end of the exact 95 %
    interval.
    """
    mean = values.mean()
    number = len(values)
    if number > 1 and np.ptp(values) == 0.0 and abs(mean) <= 1.0:
        return float(mean), unseen_share(number) / NORMAL_95
    squares = ((values - mean) ** 2).sum()
    return float(mean), float(clustered_error(squares, number, number))


def unseen_share(number: int) -> float:
    """Return the exact 95 % upper bound on the share of differing samples if all ``number`` samples are equal.

    Clopper and Pearson's, two-sided: 1 - 0.025^(1 / number); 0.52 for five samples, 0.036 for a hundred.
    """
    return float(1.0 - 0.025 ** (1.0 / number))


def share_interval(share: float, error: float) -> tuple[float, float] | None:
    """Return the one-sided 95 % interval of a share of 0 or 1, from its error (``mean_and_error``); None for others."""
    if share not in (0.0, 1.0) or not error > 0.0:
        return None
    if share == 0.0:
        return 0.0, min(1.0, NORMAL_95 * error)
    return max(0.0, 1.0 - NORMAL_95 * error), 1.0


def share_text(share: float, error: float) -> str:
    """Format a share with its error, ``0.842 ± 0.036``, or 0 and 1 with the 95 % interval, ``1.000 (0.478 to 1)``."""
    interval = share_interval(share, error)
    if interval is not None:
        low, high = interval
        return f"{share:.3f} ({low:.3g} to {high:.3g})"
    if math.isnan(error):
        return f"{share:.3f} ± -"
    return f"{share:.3f} ± {error:.3f}"


def betting_log_e(samples: Float, bounds: ArrayLike) -> Float:
    """Return the evidence against "the mean is at most 0" after each sample, by betting: its logarithm, [..., n].

    log sum_k w_k prod_i max(0, 1 + b_k x_i / B_i): a mixture of bets b_k that are constant shares of the largest
    one (grid Kelly, section B of the paper). Given the earlier ones, each of the samples x [..., n] has the mean of the
    hypothesis. No sample is below -B; the bounds B, above 0, may depend on earlier samples, and infinity places no bet.
    """
    share = samples / np.asarray(bounds, dtype=np.float64)
    gain = np.maximum(share[..., None] * _BETS, -1.0)
    with np.errstate(divide="ignore"):  # the largest bet loses everything at its bound
        capital = np.log1p(gain).cumsum(-2)
    evidence: Float = np.logaddexp.reduce(capital + _LOG_CAPITAL, axis=-1)
    return evidence


def bounds_so_far(samples: Float, sizes: Float) -> Float:
    """Return a bound for each sample [..., n] from those before it: twice the largest absolute one.

    It is infinite until there are ``FEW_DOCUMENTS`` earlier samples: no bet rests on fewer. Their effective number
    follows from their positive ``sizes`` [..., n], such as the NLL of documents.
    """
    earlier = slice(None, -1)
    largest = np.maximum.accumulate(np.abs(samples), -1)[..., earlier]
    total = sizes.cumsum(-1)[..., earlier]
    squares = (sizes**2).cumsum(-1)[..., earlier]
    number = total**2 / squares
    is_known = (number >= FEW_DOCUMENTS) & (largest > 0.0)
    bounds = np.full(samples.shape, np.inf)
    bounds[..., 1:] = np.where(is_known, _REACH * largest, np.inf)
    return bounds


def anytime_p(log_e: Float) -> Float:
    """Return p-values valid at any stopping time, 1 / largest e-value so far, from log e-values [..., n]."""
    largest = np.maximum.accumulate(np.maximum(log_e, 0.0), axis=-1)
    p_values: Float = np.exp(-largest)
    return p_values


def holm(p_values: Sequence[float], risk: float) -> list[bool]:
    """Return which hypotheses are rejected, so that any is wrongly with a probability of at most ``risk``.

    Holm's step-down test. With anytime-valid p-values it holds at any stopping time, whatever their dependence: the
    smallest of all true hypotheses is ever at most risk / their number with a probability of at most ``risk``.
    """
    rejected = [False] * len(p_values)
    ascending = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for rank, index in enumerate(ascending):
        if p_values[index] > risk / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
