"""Predict the scores of layouts from those of others by the model of ``head_weights``, with uncertainty.

Predictions are limited to the range of numbers of global heads that were scored, because the weights do not capture
what depends on that number alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spkv_nas.search.head_weights import HeadWeights, offsets

Float = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Prediction:
    """Scores modelled as b - (sum of the weights of the global heads) + noise, with b a function of their number.

    With y the scores, X the layouts, N the offsets and N+ its pseudoinverse, a new layout (n, x) has the mean
    n N+ (y + X w) - x w, averaged over the weights w; its variance adds that of its own noise and of n N+ y.

    Attributes:
        weights: posterior of the head weights.
        masks: bool [N, H], the scored layouts.
        scores: [N], their scores.
    """

    weights: HeadWeights
    masks: Mask
    scores: Float

    @classmethod
    def of(cls, masks: Mask, scores: Float, signals: Float) -> Prediction | None:
        """Fit the model as ``HeadWeights.of``; None if scores are too few or too similar."""
        weights = HeadWeights.of(masks, scores, signals)
        return None if weights is None else cls(weights, masks, scores)

    def __call__(self, masks: Mask) -> tuple[Float, Float]:
        """Return means and standard deviations [M] for layouts [M, H]; NaN outside the range of scored sizes."""
        sizes, new_sizes = self.masks.sum(1), masks.sum(1)
        scored_offsets = offsets(sizes)
        # Express each new offset as a combination of scored layouts, [M, N]
        offset_coefficients: Any = offsets(new_sizes, like=sizes) @ np.linalg.pinv(scored_offsets)  # [M, N]
        weight_coefficients = offset_coefficients @ self.masks.astype(float) - masks
        # Propagate the posterior of the weights, and noise
        mean = offset_coefficients @ self.scores + weight_coefficients @ self.weights.mean
        variance = ((weight_coefficients @ self.weights.root) ** 2).sum(1) + self.weights.noise**2 * (
            1 + (offset_coefficients**2).sum(1)
        )
        outside = (new_sizes < sizes.min()) | (new_sizes > sizes.max())
        return np.where(outside, np.nan, mean), np.where(outside, np.nan, np.sqrt(variance))
