"""What every KV head of a layout is worth: a Bayesian linear model of the scores of layouts, fitted by its evidence.

A score is modelled as b - (sum of the weights of the global heads) + noise; the weight of a head is what making it
global saves. On the embedded reference such a sum explains 99 % of the variance of 866 layouts' zero-shot ΔNLL, and
products of heads added nothing to that within 300 scores (reports/LOG.md); the noise is what heads do together.

Weights are w = v + S c: a part v of each head's own, and for every signal, a standardised column of S [H, K], one
coefficient that all heads share, so that few scores tell how far a signal is to be trusted, and in which direction. A
few heads are often worth ten times as much as all others, which one prior scale for all would shrink or, wide enough
for them, drown in noise. So each entry of (v, c) ~ N(0, s^2 (t^2 + e_j)): a scale t that all share and for few entries
an extra e_j, found one after the other as in sparse Bayesian learning (Tipping and Faul 2003). The offset b, and what
depends on the number of global heads alone, has a flat prior and is projected out; the noise variance s^2 is the best
in closed form, t and the e_j are those of the highest evidence (MacKay 1992, "Bayesian Interpolation").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

Float = NDArray[np.float64]

_REACH = 12.0  # natural logarithm of how far a prior scale may be from where it starts


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """The distribution of the weights given scores, N(mean, root root^T).

    Attributes:
        mean: [H], in the unit of the scores.
        root: [H, H + K].
        noise: standard deviation of a score around the sum of its weights.
        log_evidence: of the scores, up to a constant that depends on their number alone.
    """

    mean: Float
    root: Float
    noise: float
    log_evidence: float

    def draw(self, generator: np.random.Generator, spread: float = 1.0) -> Float:
        """Weights [H]: a sample, ``spread`` times as far from the mean."""
        drawn: Float = self.mean + spread * (self.root @ generator.standard_normal(self.root.shape[1]))
        return drawn

    @classmethod
    def of(cls, layouts: NDArray[np.bool_], scores: Float, signals: Float) -> HeadWeights | None:
        """The model of the highest evidence; None if the scores are too few or too alike to tell anything.

        Args:
            layouts: [N, H], true for global.
            scores: [N], finite; the lower the better.
            signals: [H, K], K may be 0; those that do not vary say nothing.
        """
        columns = np.hstack([np.eye(layouts.shape[1]), _standardised(signals)])  # weights = columns @ (v, c)
        evidence = Evidence.of(layouts.astype(np.float64) @ columns, -scores, offsets(layouts.sum(1)))
        if evidence is None:
            return None
        prior = evidence.best_prior()
        root = scipy.linalg.cholesky(evidence.precision(prior), lower=True)
        mean = scipy.linalg.cho_solve((root, True), evidence.moments)
        spread = scipy.linalg.solve_triangular(root, columns.T, lower=True).T  # columns @ root^-T
        noise = np.sqrt(evidence.noise_variance(mean))
        return cls(columns @ mean, noise * spread, float(noise), evidence.log(prior)[0])


@dataclass(frozen=True, eq=False)
class Evidence:
    """How probable scores are under y = F x + noise, x_j ~ N(0, s^2 p_j), noise ~ N(0, s^2), for prior variances p.

    It is looked at in the directions in which F F^T is diagonal, where a common prior variance costs a sum, and each
    feature that has more of its own one further rank: a prior costs P R, and not P^3, of which hundreds are tried.

    Attributes:
        features: [R, P], F in these R <= min(N, P) directions, after nuisances were projected out.
        values: [R], y in them.
        energy: y^T y, of all directions.
        freedom: N less the number of nuisances.
    """

    features: Float
    values: Float
    energy: float
    freedom: int

    @classmethod
    def of(cls, features: Float, values: Float, nuisances: Float) -> Evidence | None:
        """Of features [N, P] and values [N]; ``nuisances`` [N, Q] have a flat prior. None if nothing is left."""
        basis = scipy.linalg.orth(nuisances)
        features, values = (x - basis @ (basis.T @ x) for x in (features, values))
        energy, freedom = float(values @ values), len(values) - basis.shape[1]
        if freedom < 2 or energy <= 1e-12 or not (features**2).sum() > 1e-9:
            return None
        directions, lengths, turned = scipy.linalg.svd(features, full_matrices=False)
        return cls(lengths[:, None] * turned, directions.T @ values, energy, freedom)

    @cached_property
    def squares(self) -> Float:
        """[R, P], of the features."""
        return self.features**2

    @cached_property
    def moments(self) -> Float:
        """[P], F^T y."""
        return self.features.T @ self.values

    def precision(self, prior: Float) -> Float:
        """[P, P], the inverse covariance of x given the values, in units of 1 / s^2."""
        return self.features.T @ self.features + np.diag(1.0 / prior)

    def noise_variance(self, mean: Float) -> float:
        """s^2 of the highest evidence, where x has the posterior mean ``mean`` [P]."""
        return max(self.energy - float(self.moments @ mean), 1e-9 * self.energy) / self.freedom

    def log(self, prior: Float) -> tuple[float, Float, Float]:
        """(log evidence, quality [P], sparsity [P]) for prior variances [P] in units of s^2.

        With C the covariance of y in units of s^2 and f_j a feature: quality is f_j^T C^-1 y / s, sparsity f_j^T C^-1
        f_j. The evidence's derivative by p_j is (quality^2 - sparsity) / 2.
        """
        common = prior.min()
        own = np.flatnonzero(prior > common)  # C = diag(spread) + (their features) diag(extra) (their features)^T
        extra, spread = prior[own] - common, 1.0 + common * self.squares.sum(1)
        quality = (self.values / spread) @ self.features
        sparsity = (1.0 / spread) @ self.squares
        log_determinant = np.log(spread).sum()
        if len(own):  # Woodbury's identity
            products = (self.features[:, own].T / spread) @ self.features
            root = scipy.linalg.cholesky(np.diag(1.0 / extra) + products[:, own], lower=True)
            products = scipy.linalg.solve_triangular(root, products, lower=True)
            quality = quality - scipy.linalg.solve_triangular(root, quality[own], lower=True) @ products
            sparsity = sparsity - (products**2).sum(0)
            log_determinant += np.log(extra).sum() + 2 * np.log(np.diag(root)).sum()
        variance = self.noise_variance(prior * quality)
        log_evidence = -(self.freedom * np.log(variance) + log_determinant) / 2
        return float(log_evidence), quality / np.sqrt(variance), sparsity

    def best_prior(self) -> Float:
        """[P], prior variances: a common one, and more for the features that are worth it.

        One more scale must raise the log evidence by log(P), the price of having chosen it among P.
        """
        count = len(self.moments)
        chosen: list[int] = []
        common = -np.log(self.squares.sum(0).mean())  # logarithm of t^2, such that a weight shows as much as noise
        scales = self._climbed(np.array([common]), chosen)
        while True:
            prior = self._prior(scales, chosen)
            _, quality, sparsity = self.log(prior)
            excess = quality**2 / np.maximum(sparsity, 1e-12)
            gain = np.where(excess > 1, (excess - 1 - np.log(np.maximum(excess, 1))) / 2, 0.0)
            gain[chosen] = 0.0
            new = int(gain.argmax())
            if gain[new] <= np.log(count):
                return prior
            chosen.append(new)
            start = np.log((excess[new] - 1) / sparsity[new])  # where the evidence is highest, the others as they are
            scales = self._climbed(np.append(scales, start), chosen)

    def _prior(self, scales: Float, chosen: list[int]) -> Float:
        prior = np.full(len(self.moments), np.exp(scales[0]))
        prior[chosen] += np.exp(scales[1:])
        return prior

    def _climbed(self, start: Float, chosen: list[int]) -> Float:
        """Logarithms of the scales, the common one first, from ``start`` to the highest evidence."""

        def descent(scales: Float) -> tuple[float, Float]:
            value, quality, sparsity = self.log(self._prior(scales, chosen))
            slope = (quality**2 - sparsity) / 2
            return -value, -np.exp(scales) * np.array([slope.sum(), *slope[chosen]])

        bounds = [(each - _REACH, each + _REACH) for each in start]
        found: Any = scipy.optimize.minimize(descent, start, jac=True, method="L-BFGS-B", bounds=bounds)
        scales: Float = found.x
        return scales


def _standardised(signals: Float) -> Float:
    """Signals [H, K] with mean 0 and variance 1, without those that do not vary."""
    centred = signals - signals.mean(0)
    scale = centred.std(0)
    varies = scale > 1e-12
    result: Float = centred[:, varies] / scale[varies]
    return result


def offsets(numbers: NDArray[np.int64], like: NDArray[np.int64] | None = None) -> Float:
    """[N, 3]: what may depend on the number of global heads alone, a parabola; in the unit of the numbers ``like``."""
    like = numbers if like is None else like
    scaled = (numbers - like.mean()) / max(1.0, float(np.ptp(like)))
    return np.stack([np.ones(len(numbers)), scaled, scaled**2], 1)
