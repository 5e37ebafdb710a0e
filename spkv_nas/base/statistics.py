"""Standard errors with documents as clusters; needs no torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

NORMAL_95 = 1.96  # standard errors on either side of 95 %
FEW_DOCUMENTS = 20  # below this number of clusters, normal intervals are known to be too narrow
_TWO_SIDED = 0.975


def clustered_error(squares: ArrayLike, clusters: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
    """Standard error of a ratio, sum of values / sum of tokens, over documents (a ratio estimator by cluster).

    sqrt(squares * C / (C - 1)) / tokens, with ``squares`` the sum over documents of (value - ratio * tokens)^2, ``C``
    the number of documents and ``tokens`` those of all documents. The arguments broadcast. NaN of fewer than two
    documents: one alone says nothing about the spread between documents.
    """
    number: Any = np.asarray(clusters)
    spread = np.maximum(np.asarray(squares, dtype=np.float64), 0.0)
    error = np.sqrt(spread * number / np.maximum(number - 1, 1)) / np.maximum(tokens, 1)
    return np.where(number > 1, error, np.nan)


def effective_number(sizes: ArrayLike) -> float:
    """Compute (sum of sizes)^2 / (sum of squared sizes): clusters of equal size that are worth as much; 0 of none."""
    number: NDArray[np.float64] = np.asarray(sizes, dtype=np.float64)
    squares = float((number**2).sum())
    return float(number.sum()) ** 2 / squares if squares > 0 else 0.0


def critical_errors(effective: float) -> float:
    """Return how many standard errors lie on either side of a 95 % interval: two, or more where documents are few.

    Below ``FEW_DOCUMENTS``, Student's t with ``effective`` - 1 degrees of freedom; beside ``jackknife_ratio`` it
    covers 92 to 100 % for log-normal document lengths (40,000 simulated draws, ``reports/LOG.md``).

    Args:
        effective: ``effective_number`` of the documents; NaN where it is not known, which counts as many.
    """
    if not effective < FEW_DOCUMENTS:
        return 2.0
    return float(stdtrit(effective - 1.0, _TWO_SIDED)) if effective > 1.0 else math.inf


def jackknife_ratio(
    values: NDArray[np.float64], bases: NDArray[np.float64] | NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute (sum of values / sum of bases, its standard error) over clusters.

    sqrt((K - 1) / K * sum((r / (1 - w))^2)) / sum of bases, with r = value - ratio * base, w the cluster's share of the
    bases and K the number of clusters: the linearised delete-one-cluster jackknife (CR3; MacKinnon, Nielsen and Webb
    2023, "Cluster-robust inference: a guide to empirical practice").

    Args:
        values: [..., clusters].
        bases: [clusters]; clusters of 0 are left out.

    Returns:
        Both [...]; the error is NaN of fewer than two clusters.
    """
    seen = bases > 0
    values, bases = values[..., seen], bases[seen]
    total, number = bases.sum(), len(bases)
    ratio = values.sum(-1) / total
    if number < 2:
        return ratio, np.full_like(ratio, np.nan)
    residual = (values - ratio[..., None] * bases) / (1.0 - bases / total)
    return ratio, np.sqrt((number - 1) / number * (residual**2).sum(-1)) / total


def mean_and_error(values: NDArray[np.float64]) -> tuple[float, float]:
    """Average values of samples: (mean, its standard error).

    Of shares in [0, 1], or differences of two, that all came out alike the spread is 0, which says nothing about other
    samples: their error is a 1.96th of ``unseen_share``, so that 1.96 errors reach the end of the exact 95 % interval.
    """
    mean, number = values.mean(), len(values)
    error = float(clustered_error(((values - mean) ** 2).sum(), number, number))
    alike = number > 1 and np.ptp(values) == 0.0 and abs(mean) <= 1.0
    return float(mean), unseen_share(number) / NORMAL_95 if alike else error


def unseen_share(number: int) -> float:
    """Bound the share of samples that are unlike ``number`` samples which are all alike: exact 95 % interval.

    Clopper and Pearson's, two-sided: 1 - 0.025^(1 / number); of five samples 0.52, of a hundred 0.036.
    """
    return float(1.0 - 0.025 ** (1.0 / number))


def share_interval(share: float, error: float) -> tuple[float, float] | None:
    """Give the 95 % interval of a share that is 0 or 1, from the error of ``mean_and_error``; None of another share.

    There it reaches to one side alone, and no plus-minus can say it.
    """
    if share not in (0.0, 1.0) or not error > 0.0:
        return None
    return (0.0, min(1.0, NORMAL_95 * error)) if share == 0.0 else (max(0.0, 1.0 - NORMAL_95 * error), 1.0)


def share_text(share: float, error: float) -> str:
    """Write a share such as ``0.842 ± 0.036``, or of 0 and 1 with its 95 % interval: ``1.000 (0.478 to 1)``."""
    interval = share_interval(share, error)
    if interval is None:
        return f"{share:.3f} ± {'-' if math.isnan(error) else f'{error:.3f}'}"
    return f"{share:.3f} ({interval[0]:.3g} to {interval[1]:.3g})"
