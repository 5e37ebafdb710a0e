"""Fit the benefit of every KV head to layout scores by a Bayesian linear model, with priors chosen by evidence.

A score is modelled as b - (sum of the weights of the global heads) + noise. On the embedded reference this sum explains
99 % of the variance of 866 layouts' zero-shot ΔNLL (reports/LOG.md).

Weights are w = v + S c: an individual part v per head, and per signal, a standardised column of S [H, K], one
coefficient shared by all heads. A few heads often matter ten times as much as all others, so each entry of (v, c) ~
N(0, s^2 (t^2 + e_j)): a common scale t, and for few entries an extra variance e_j, selected one after the other as in
sparse Bayesian learning (Tipping and Faul 2003). What depends only on the number of global heads is projected out;
t and the e_j maximise the evidence (MacKay 1992, "Bayesian Interpolation").
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy

from spkv_nas.base.arrays import Float, Int, Mask

_REACH = 12.0  # bound on the change of a log prior scale during optimisation


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Posterior distribution of the weights given scores, N(mean, root root^T)."""

    mean: Float  # [H], in the unit of the scores
    root: Float  # [H, H + K]
    noise: float  # standard deviation of a score around its modelled value

    def draw(self, generator: np.random.Generator, spread: float = 1.0) -> Float:
        """Draw weights [H] from the posterior, with deviations from the mean scaled by ``spread``."""
        deviation = self.root @ generator.standard_normal(self.root.shape[1])
        return np.asarray(self.mean + spread * deviation)

    @classmethod
    def of(cls, layouts: Mask, scores: Float, signals: Float) -> "HeadWeights | None":
        """Fit the model of highest evidence; None if scores are too few or too similar.

        Args:
            layouts: [N, H], true for global.
            scores: [N], finite; lower is better.
            signals: [H, K], K may be 0; constant columns are ignored.
        """
        # Scale the signals to mean 0 and variance 1
        centred = signals - signals.mean(0)
        scale = centred.std(0)
        varies = scale > 1e-12
        # Set up the regression, offsets projected out; weights = columns @ (v, c)
        columns = np.hstack([np.eye(layouts.shape[1]), centred[:, varies] / scale[varies]])
        features = layouts.astype(np.float64) @ columns
        evidence = Evidence.of(features, -scores, offsets(layouts.sum(1)))
        if evidence is None:
            return None
        # Choose prior variances by evidence
        prior = evidence.best_prior()
        # Compute the posterior of (v, c), then of the weights
        root = scipy.linalg.cholesky(evidence.precision(prior), lower=True)
        mean = scipy.linalg.cho_solve((root, True), evidence.moments)
        spread = scipy.linalg.solve_triangular(root, columns.T, lower=True).T  # columns @ root^-T
        noise = np.sqrt(evidence.noise_variance(mean))
        return cls(columns @ mean, noise * spread, float(noise))


@dataclass(frozen=True, eq=False)
class Evidence:
    """Evidence of scores under y = F x + noise, x_j ~ N(0, s^2 p_j), noise ~ N(0, s^2), for prior variances p.

    Computed in the basis in which F F^T is diagonal: a common prior variance then costs a sum, and each feature with an
    extra variance one further rank, so evaluating a prior costs P R instead of P^3; hundreds are evaluated.
    """

    features: Float  # [R, P], F in these R <= min(N, P) directions, after projecting out nuisances
    values: Float  # [R], y in these directions
    energy: float  # y^T y over all directions
    freedom: int  # degrees of freedom, N minus the number of nuisances

    @classmethod
    def of(cls, features: Float, values: Float, nuisances: Float) -> "Evidence | None":
        """Project nuisances [N, Q] out of features [N, P] and values [N]; None if nothing is left to fit."""
        basis = scipy.linalg.orth(nuisances)
        features = features - basis @ (basis.T @ features)
        values = values - basis @ (basis.T @ values)
        energy = float(values @ values)
        freedom = len(values) - basis.shape[1]
        if freedom < 2 or energy <= 1e-12 or not (features**2).sum() > 1e-9:
            return None
        directions, singular_values, rotation = scipy.linalg.svd(features, full_matrices=False)
        return cls(singular_values[:, None] * rotation, directions.T @ values, energy, freedom)

    @cached_property
    def squares(self) -> Float:
        """Return the squared features [R, P]."""
        return self.features**2

    @cached_property
    def moments(self) -> Float:
        """Return F^T y [P]."""
        return self.features.T @ self.values

    def precision(self, prior: Float) -> Float:
        """Return the inverse posterior covariance of x [P, P], in units of 1 / s^2."""
        return self.features.T @ self.features + np.diag(1.0 / prior)

    def noise_variance(self, mean: Float) -> float:
        """Return the s^2 of highest evidence, for the posterior mean ``mean`` [P] of x."""
        return max(self.energy - float(self.moments @ mean), 1e-9 * self.energy) / self.freedom

    def log(self, prior: Float) -> tuple[float, Float, Float]:
        """Return (log evidence, quality [P], sparsity [P]) for prior variances [P] in units of s^2.

        With C the covariance of y in units of s^2 and f_j a feature: quality is f_j^T C^-1 y / s, sparsity is
        f_j^T C^-1 f_j. The derivative of the evidence by p_j is (quality^2 - sparsity) / 2.
        """
        # Invert the diagonal part of C, from the common variance
        common = prior.min()
        # C = diag(spread) + F_extra diag(extra) F_extra^T
        with_extra = np.flatnonzero(prior > common)
        extra = prior[with_extra] - common
        spread = 1.0 + common * self.squares.sum(1)
        quality = (self.values / spread) @ self.features
        sparsity = (1.0 / spread) @ self.squares
        log_determinant = np.log(spread).sum()
        # Add the extra variances by Woodbury's identity
        if len(with_extra):
            products = (self.features[:, with_extra].T / spread) @ self.features
            root = scipy.linalg.cholesky(np.diag(1.0 / extra) + products[:, with_extra], lower=True)
            products = scipy.linalg.solve_triangular(root, products, lower=True)
            extra_quality = scipy.linalg.solve_triangular(root, quality[with_extra], lower=True)
            quality = quality - extra_quality @ products
            sparsity = sparsity - (products**2).sum(0)
            log_determinant += np.log(extra).sum() + 2 * np.log(np.diag(root)).sum()
        # Combine into the log evidence
        variance = self.noise_variance(prior * quality)
        log_evidence = -(self.freedom * np.log(variance) + log_determinant) / 2
        return float(log_evidence), quality / np.sqrt(variance), sparsity

    def best_prior(self) -> Float:
        """Return the prior variances [P] of highest evidence; each extra one must raise its log by log(P)."""
        # Start with a common variance
        count = len(self.moments)
        chosen: list[int] = []
        # log of t^2 at which weights contribute as much as noise
        common = -np.log(self.squares.sum(0).mean())
        scales = self._optimised_scales(np.array([common]), chosen)
        while True:
            prior = self._prior(scales, chosen)
            # Estimate the gain in evidence from an extra variance of each feature
            _, quality, sparsity = self.log(prior)
            excess = quality**2 / np.maximum(sparsity, 1e-12)
            gain = np.where(excess > 1, (excess - 1 - np.log(np.maximum(excess, 1))) / 2, 0.0)
            gain[chosen] = 0.0
            new = int(gain.argmax())
            if gain[new] <= np.log(count):
                return prior
            # Add the best one, and optimise all scales
            chosen.append(new)
            # Optimum with the other scales fixed
            start = np.log((excess[new] - 1) / sparsity[new])
            scales = self._optimised_scales(np.append(scales, start), chosen)

    def _prior(self, scales: Float, chosen: list[int]) -> Float:
        """Return the prior variances [P] for log scales: the common one, then those of the chosen features."""
        prior = np.full(len(self.moments), np.exp(scales[0]))
        prior[chosen] += np.exp(scales[1:])
        return prior

    def _optimised_scales(self, start: Float, chosen: list[int]) -> Float:
        """Maximise the evidence over log scales, the common one first, starting from ``start``."""

        def objective(scales: Float) -> tuple[float, Float]:
            """Return negative log evidence and its gradient."""
            value, quality, sparsity = self.log(self._prior(scales, chosen))
            slope = (quality**2 - sparsity) / 2
            slopes = np.array([slope.sum(), *slope[chosen]])
            return -value, -np.exp(scales) * slopes

        bounds = [(scale - _REACH, scale + _REACH) for scale in start]
        optimum = scipy.optimize.minimize(
            objective, start, jac=True, method="L-BFGS-B", bounds=bounds
        )
        return np.asarray(optimum.x)


def offsets(numbers: Int) -> Float:
    """Return the nuisance regressors [N, 3], a parabola in the numbers [N] of global heads."""
    scaled = (numbers - numbers.mean()) / max(1.0, float(np.ptp(numbers)))
    return np.vander(scaled, 3, increasing=True)
