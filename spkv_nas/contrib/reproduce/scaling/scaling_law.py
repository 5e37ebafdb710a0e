"""Fit the scaling law ``L(C) = L_inf + A C^-alpha`` of NLL against training compute, with confidence intervals.

SP-KV paper, section "Scaling analysis". C is training compute in FLOPs; L_inf is the irreducible NLL. The fit minimises
squared errors of the NLL. To decorrelate the parameters, the amplitude is fitted as a logarithm, at the geometric mean
of the runs' compute.

Intervals use Student's t with n - 3 degrees of freedom on the linearised covariance. On simulated ladders (the paper's
law, noise 0.006), 95 % intervals covered the true value in 96 to 97 % of 400 draws with 11 runs, 95 to 96 % with 6,
92 to 95 % with 5; bootstrapped residuals in 92 to 93 % with 11. Intervals cover the scatter of runs about the law, not
a failure of the law beyond them; predictions of held-out runs test that.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy  # imports its subpackages on first use
from numpy.typing import ArrayLike, NDArray

from spkv_nas.base import limits, tables
from spkv_nas.base.errors import UserError

_RUNS = (
    tables.Column("name", default=""),
    tables.Column("variant", default=""),
    tables.Column("train_flops", "number", above=0, high=1e100),
    tables.Column("nll", "number", above=0, high=limits.MAX_SHOWN),
    tables.Column("held_out", default="0", choices=("0", "1")),
)
MIN_RUNS = 4
CONFIDENCE = 0.95
_EXPONENTS = np.geomspace(1e-3, 3.0, 60)  # outside, the law is indistinguishable from a logarithm or a step

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted scaling law.

    ``parameters`` [3] are L_inf, the log of the amplitude at ``reference`` FLOPs, and alpha; ``residual`` is the
    standard deviation of runs about the law. It and ``covariance`` [3, 3] are NaN without degrees of freedom.
    """

    parameters: Array
    covariance: Array
    reference: float
    residual: float
    r_squared: float
    num_runs: int

    def __call__(self, compute: ArrayLike) -> Array:
        """Return the NLL at ``compute`` FLOPs."""
        return _law(self.parameters, self._x(compute))

    @property
    def irreducible(self) -> Interval:
        """Return L_inf."""
        return self._interval(np.array([1.0, 0.0, 0.0]))

    @property
    def exponent(self) -> Interval:
        """Return alpha."""
        return self._interval(np.array([0.0, 0.0, 1.0]))

    @property
    def amplitude(self) -> Interval:
        """Return A, the reducible NLL at 1 FLOP, with a wide interval, as 1 FLOP is far from the runs."""
        log = self._interval(np.array([0.0, 1.0, np.log(self.reference)]))
        with np.errstate(over="ignore"):  # with few runs, A may be unbounded
            return Interval(*(float(np.exp(end)) for end in (log.value, log.low, log.high)))

    def predict(self, compute: float) -> Interval:
        """Predict the NLL of one more run at ``compute`` FLOPs, with an interval that includes the runs' scatter."""
        gradient = _jacobian(self.parameters, np.atleast_1d(self._x(compute)))[0]
        spread = np.sqrt(gradient @ self.covariance @ gradient + self.residual**2)
        value, half_width = float(self(compute)), self._quantile() * float(spread)
        return Interval(value, value - half_width, value + half_width)

    def _interval(self, weights: Array) -> Interval:
        """Return the interval of a linear combination of the parameters."""
        value = float(weights @ self.parameters)
        half_width = self._quantile() * float(np.sqrt(weights @ self.covariance @ weights))
        return Interval(value, value - half_width, value + half_width)

    def _quantile(self) -> float:
        """Return the quantile of Student's t; NaN without degrees of freedom."""
        return float(scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, self.num_runs - 3)) if self.num_runs > 3 else np.nan

    def _x(self, compute: ArrayLike) -> Array:
        """Return log(compute / reference)."""
        return np.asarray(np.log(np.asarray(compute, dtype=np.float64) / self.reference))


def fit(compute: ArrayLike, nll: ArrayLike) -> ScalingLaw:
    """Fit the law to runs of ``compute`` FLOPs and ``nll``, both [n], by least squares.

    Raises ``UserError`` if there are fewer than 3 different computes, or the runs do not follow such a law: the NLL
    does not fall, or falls along or below a straight line in log compute, so that L_inf cannot be estimated.
    """
    flops, loss = np.asarray(compute, dtype=np.float64), np.asarray(nll, dtype=np.float64)
    if len(np.unique(flops)) < 3:
        raise UserError(
            f"a law of three parameters needs runs at 3 or more amounts of compute; found {len(np.unique(flops))}"
        )
    # Fit from the initial parameters
    reference = float(np.exp(np.log(flops).mean()))
    x = np.log(flops / reference)
    start = _start(x, loss)
    options = {"x_scale": "jac", "method": "lm", **dict.fromkeys(("xtol", "ftol", "gtol"), 1e-14)}
    solution = scipy.optimize.least_squares(lambda p: _law(p, x) - loss, start, lambda p: _jacobian(p, x), **options)
    # Covariance, linearised at the solution
    errors = float(solution.fun @ solution.fun)
    degrees_of_freedom = len(flops) - 3
    variance = errors / degrees_of_freedom if degrees_of_freedom else np.nan
    inverse = np.linalg.inv(np.linalg.qr(solution.jac, mode="r"))
    return ScalingLaw(
        parameters=solution.x,
        covariance=variance * (inverse @ inverse.T),
        reference=reference,
        residual=float(np.sqrt(variance)),
        r_squared=1.0 - errors / float(((loss - loss.mean()) ** 2).sum()),
        num_runs=len(flops),
    )


def read_runs(path: Path) -> pd.DataFrame:
    """Read runs from a CSV file with ``train_flops`` and ``nll``, and optionally ``name``, ``variant``, ``held_out``.

    Runs without names are numbered by row. Each variant is a ladder of its own (default ``""``). Held-out runs (1, else
    0) are predicted but not fitted. Variants are as in the file, then sorted by compute.
    """
    runs = tables.read_table(path, "runs", _RUNS, others=True)
    if (runs["name"] == "").all():
        runs["name"] = [str(number) for number in range(1, len(runs) + 1)]
    order = {variant: number for number, variant in enumerate(runs["variant"].unique())}
    return (
        runs.assign(held_out=runs["held_out"] == "1", _key=runs["variant"].map(order))
        .sort_values(["_key", "train_flops"], kind="stable")
        .drop(columns="_key")
        .reset_index(drop=True)
    )


def fit_runs(runs: pd.DataFrame) -> dict[str, ScalingLaw]:
    """Fit the law of each variant of ``read_runs``; ``UserError`` if one has too few runs or follows no law."""
    laws = {}
    for variant, rows in runs.groupby("variant", sort=False):
        where = f"variant '{variant}': " if variant else ""
        fitted = rows[~rows["held_out"]]
        count = fitted["train_flops"].nunique()
        if count < MIN_RUNS:
            raise UserError(
                f"{where}{count} different amounts of compute; a law of three parameters needs at least {MIN_RUNS}"
            )
        try:
            laws[str(variant)] = fit(fitted["train_flops"], fitted["nll"])
        except UserError as error:
            raise UserError(f"{where}{error}") from error
    return laws


def describe_laws(runs: pd.DataFrame, laws: dict[str, ScalingLaw]) -> list[dict[str, Any]]:
    """Describe each variant's law as plain values: parameters with intervals, goodness of fit, predictions."""
    return [_describe(variant, law, runs[runs["variant"] == variant]) for variant, law in laws.items()]


def _describe(variant: str, law: ScalingLaw, runs: pd.DataFrame) -> dict[str, Any]:
    """Describe one variant's law as plain values."""
    parameters = {"L_inf": law.irreducible, "A": law.amplitude, "alpha": law.exponent}
    return {
        "variant": variant,
        "law": "L(C) = L_inf + A C^-alpha",
        "num_runs": law.num_runs,
        "confidence": CONFIDENCE,
        "parameters": {name: [_plain(v) for v in (i.value, i.low, i.high)] for name, i in parameters.items()},
        "r_squared": _plain(law.r_squared, 8),
        "residual": _plain(law.residual),
        "runs": [_describe_run(run, law.predict(run.train_flops)) for run in runs.itertuples()],
    }


def _describe_run(run: Any, predicted: Interval) -> dict[str, Any]:
    """Describe a run, and the NLL that the law predicts for it with the interval of one run."""
    return {
        "name": run.name,
        "held_out": bool(run.held_out),
        "train_flops": _plain(run.train_flops),
        "nll": _plain(run.nll),
        "predicted": _plain(predicted.value),
        "low": _plain(predicted.low),
        "high": _plain(predicted.high),
        "error_percent": _plain(100.0 * (predicted.value / run.nll - 1.0), 3),
    }


def _law(parameters: Array, x: Array) -> Array:
    """Evaluate the law at ``x`` = log(compute / reference), [n]."""
    irreducible, log_amplitude, exponent = parameters
    return np.asarray(irreducible + np.exp(log_amplitude - exponent * x))


def _jacobian(parameters: Array, x: Array) -> Array:
    """Return the derivatives of ``_law`` by its parameters, [n, 3]."""
    reducible = np.exp(parameters[1] - parameters[2] * x)
    return np.column_stack([np.ones_like(x), reducible, -x * reducible])


def _start(x: Array, loss: Array) -> Array:
    """Return initial parameters of the fit, by a search of the exponent, as the other two are linear given it."""

    def solve(exponent: float) -> tuple[float, Array]:
        basis = np.column_stack([np.ones_like(x), np.exp(-exponent * x)])
        linear = np.linalg.lstsq(basis, loss, rcond=None)[0]
        return float(((basis @ linear - loss) ** 2).sum()), linear

    # Search the exponent on a grid, and reject data without a power law
    best = int(np.argmin([solve(exponent)[0] for exponent in _EXPONENTS]))
    if not solve(_EXPONENTS[best])[1][1] > 0.0:
        raise UserError("the NLL does not fall with compute, so there is no power law to fit")
    if best in (0, len(_EXPONENTS) - 1):
        raise UserError(
            "the runs show no power law: the NLL falls along a straight line in log compute or faster"
            if best == 0
            else "the runs show no power law: the NLL falls in one step"
        )
    # Refine the exponent
    bounds = (_EXPONENTS[best - 1], _EXPONENTS[best + 1])
    exponent = float(scipy.optimize.minimize_scalar(lambda e: solve(e)[0], bounds=bounds, method="bounded").x)
    irreducible, amplitude = solve(exponent)[1]
    return np.array([irreducible, np.log(amplitude), exponent])


def _plain(value: float, digits: int = 6) -> float:
    """Round to significant digits."""
    return float(f"{value:.{digits}g}")
