"""Fit ridge regression in closed form: coefficients, their errors, and the penalty of least leave-one-out error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_PENALTIES = np.logspace(-6, 3, 55)  # in units of the mean square of the design's singular values

Float = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Ridge:
    """A ridge regression of responses [n] on a design [n, p] with an intercept, reusable for other responses.

    Attributes:
        design: [n, p], minus its column means.
        operator: [p, n], maps responses to coefficients.
        variance: [p], variance of the coefficients in units of the residual variance.
        freedom: residual degrees of freedom, n minus the effective number of parameters.
        penalty: the chosen penalty.
        squared_error: mean squared leave-one-out error.
        explained: 1 - squared_error / leave-one-out error of predicting the mean.
    """

    design: Float
    operator: Float
    variance: Float
    freedom: float
    penalty: float
    squared_error: float
    explained: float

    @classmethod
    def fit(cls, design: Float, responses: Float) -> Ridge:
        """Fit with the penalty of least squared leave-one-out error, where each error is residual / (1 - leverage)."""
        number = len(design)
        design, centred = design - design.mean(0), responses - responses.mean()
        # Decompose the design, leaving out null directions
        left, singular, right = np.linalg.svd(design, full_matrices=False)
        is_nonzero = singular > singular[0] * 1e-9
        left, square, right = left[:, is_nonzero], singular[is_nonzero] ** 2, right[is_nonzero]
        # Compute the leave-one-out error of every penalty
        penalties = _PENALTIES * square.mean()
        shrunk = square / (square + penalties[:, None])  # [penalties, rank]
        residuals = centred - (shrunk * (left.T @ centred)) @ left.T
        leverage = 1 / number + shrunk @ (left**2).T
        errors = np.square(residuals / np.maximum(1 - leverage, 1e-9)).sum(1)
        best = int(errors.argmin())
        return cls(
            design,
            operator=right.T * (shrunk[best] / np.sqrt(square)) @ left.T,
            variance=(right**2).T @ (1 / (square + penalties[best])),
            freedom=number - 1 - float(shrunk[best].sum()),
            penalty=float(penalties[best]),
            squared_error=float(errors[best] / number),
            explained=1 - float(errors[best] / max(np.square(centred * number / (number - 1)).sum(), 1e-300)),
        )

    def error(self, responses: Float) -> Float:
        """Return [p], the standard errors of the coefficients for ``responses`` [n], from the residual variance."""
        residuals = responses - responses.mean() - self.design @ (self.operator @ responses)
        return np.asarray(np.sqrt(self.variance * np.square(residuals).sum() / self.freedom))
