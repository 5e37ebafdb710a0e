"""What a layout's score will be, by the scores of others: the model of ``head_weights``, with its interval.

Within the numbers of global heads that were scored; of others it says nothing, because what depends on the number alone
is not part of the weights.
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
    """Scores b - (sum of the weights of the global heads) + noise, b of the number of global heads.

    With y the scores, X the layouts, N the offsets and N+ its pseudoinverse, a new layout (n, x) has the mean
    n N+ (y + X w) - x w, over the weights w, and besides the variance of its own noise and of n N+ y.

    Attributes:
        weights: of the heads.
        masks: bool [N, H], the layouts that were scored, and ``scores`` [N].
    """

    weights: HeadWeights
    masks: Mask
    scores: Float

    @classmethod
    def of(cls, masks: Mask, scores: Float, signals: Float) -> Prediction | None:
        """None if the scores are too few or too alike to tell anything; as ``HeadWeights.of``."""
        weights = HeadWeights.of(masks, scores, signals)
        return None if weights is None else cls(weights, masks, scores)

    def __call__(self, masks: Mask) -> tuple[Float, Float]:
        """Means and standard deviations [M] of the scores of layouts [M, H]; NaN for numbers that were not scored."""
        sizes, new = self.masks.sum(1), masks.sum(1)
        known = offsets(sizes)
        shares: Any = offsets(new, like=sizes) @ np.linalg.pinv(known)  # [M, N]
        reach = shares @ self.masks.astype(float) - masks
        mean = shares @ self.scores + reach @ self.weights.mean
        variance = ((reach @ self.weights.root) ** 2).sum(1) + self.weights.noise**2 * (1 + (shares**2).sum(1))
        outside = (new < sizes.min()) | (new > sizes.max())
        return np.where(outside, np.nan, mean), np.where(outside, np.nan, np.sqrt(variance))
