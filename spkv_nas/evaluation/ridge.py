"""Ridge regression in closed form: coefficients, their errors, and the penalty of least leave-one-out error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_PENALTIES = np.logspace(-6, 3, 55)  # in units of the mean square of the design's singular values

Float = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Ridge:
    """A ridge regression of responses [n] on a design [n, p], with an intercept, ready for other responses.

    Attributes:
        design: [n, p], less its means.
        operator: [p, n], from responses to coefficients.
        variance: [p], of the coefficients, in units of the residuals' variance.
        freedom: of the residuals: n less the effective number of parameters.
        penalty: chosen.
        squared_error: mean over the responses, each predicted from the others (leave-one-out).
        explained: 1 - squared error / that of the others' mean.
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
        """The one whose penalty has the least squared leave-one-out error: the residual / (1 - leverage)."""
        number = len(design)
        design, centred = design - design.mean(0), responses - responses.mean()
        left, singular, right = np.linalg.svd(design, full_matrices=False)
        kept = singular > singular[0] * 1e-9
        left, square, right = left[:, kept], singular[kept] ** 2, right[kept]
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
        """[p], standard errors of the coefficients for ``responses`` [n], of what the design leaves unexplained."""
        residuals = responses - responses.mean() - self.design @ (self.operator @ responses)
        return np.asarray(np.sqrt(self.variance * np.square(residuals).sum() / self.freedom))
