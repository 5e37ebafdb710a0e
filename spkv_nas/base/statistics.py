"""Standard errors with documents as clusters; needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


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


def mean_and_error(values: NDArray[np.float64]) -> tuple[float, float]:
    """(mean over samples, its standard error)."""
    mean, number = values.mean(), len(values)
    return float(mean), float(clustered_error(((values - mean) ** 2).sum(), number, number))
