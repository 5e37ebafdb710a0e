"""The scaling law ``L(C) = L_inf + A C^-alpha``: NLL against training compute, fitted, with what the fit can tell.

SP-KV paper, section "Scaling analysis". C is training compute in FLOPs; L_inf is the NLL no compute undercuts. Least
squares in the NLL, in a parametrisation that keeps the three apart: the amplitude is taken at the geometric mean of the
runs' compute, in logarithm.

Intervals are Student's t with n - 3 degrees of freedom on the linearised covariance. On simulated ladders (the
paper's law, noise 0.006) 95 % intervals held the true value in 96 to 97 % of 400 draws with 11 runs, 95 to 96 % with 6,
92 to 95 % with 5; bootstrapped residuals in 92 to 93 % with 11. They cover the scatter of the runs about the law, not
a law that does not hold beyond them: for that there are the predictions of runs that the fit has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy  # whose parts are imported when they are used
from numpy.typing import ArrayLike, NDArray

from spkv_nas.base.errors import UserError
from spkv_nas.base.limits import MOST_SHOWN
from spkv_nas.base.records import write_record
from spkv_nas.base.replace import replacing
from spkv_nas.base.tables import Column, read_table
from spkv_nas.base.version import environment

_RUNS = (
    Column("name", default=""),
    Column("variant", default=""),
    Column("train_flops", "number", above=0, high=1e100),
    Column("nll", "number", above=0, high=MOST_SHOWN),
    Column("held_out", default="0", choices=("0", "1")),
)
MIN_RUNS = 4
CONFIDENCE = 0.95
_EXPONENTS = np.geomspace(1e-3, 3.0, 60)  # outside, the law cannot be told from a logarithm or from a step

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted law. ``parameters`` are L_inf, log of the amplitude at ``reference`` FLOPs, and alpha.

    ``covariance`` [3, 3] is theirs; ``residual`` the standard deviation of a run about the law; both NaN where the
    runs leave no degree of freedom.
    """

    parameters: Array
    covariance: Array
    reference: float
    residual: float
    r_squared: float
    num_runs: int

    def __call__(self, compute: ArrayLike) -> Array:
        """NLL at ``compute`` FLOPs."""
        return _law(self.parameters, self._x(compute))

    @property
    def irreducible(self) -> Interval:
        """L_inf."""
        return self._interval(np.array([1.0, 0.0, 0.0]))

    @property
    def exponent(self) -> Interval:
        """alpha."""
        return self._interval(np.array([0.0, 0.0, 1.0]))

    @property
    def amplitude(self) -> Interval:
        """A, the reducible NLL at 1 FLOP: far outside the runs, so its interval is wide, and symmetric in log A."""
        log = self._interval(np.array([0.0, 1.0, np.log(self.reference)]))
        with np.errstate(over="ignore"):  # few runs may leave A open
            return Interval(*(float(np.exp(end)) for end in (log.value, log.low, log.high)))

    def predict(self, compute: float) -> Interval:
        """NLL of one more run at ``compute`` FLOPs: uncertainty of the law, and the scatter of a run about it."""
        gradient = _jacobian(self.parameters, np.atleast_1d(self._x(compute)))[0]
        spread = np.sqrt(gradient @ self.covariance @ gradient + self.residual**2)
        value, half = float(self(compute)), self._quantile() * float(spread)
        return Interval(value, value - half, value + half)

    def _interval(self, weights: Array) -> Interval:
        value = float(weights @ self.parameters)
        half = self._quantile() * float(np.sqrt(weights @ self.covariance @ weights))
        return Interval(value, value - half, value + half)

    def _quantile(self) -> float:
        return float(scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, self.num_runs - 3)) if self.num_runs > 3 else np.nan

    def _x(self, compute: ArrayLike) -> Array:
        return np.asarray(np.log(np.asarray(compute, dtype=np.float64) / self.reference))


def fit(compute: ArrayLike, nll: ArrayLike) -> ScalingLaw:
    """The least-squares law through runs of ``compute`` FLOPs and ``nll``, both [n].

    Raises:
        UserError: fewer than 3 different computes, or runs that do not follow such a law: NLL that does not fall, or
            falls along or below a straight line in log compute, so that no L_inf shows.
    """
    flops, loss = np.asarray(compute, dtype=np.float64), np.asarray(nll, dtype=np.float64)
    if len(np.unique(flops)) < 3:
        raise UserError(f"a law of three parameters needs runs at 3 or more computes; found {len(np.unique(flops))}")
    reference = float(np.exp(np.log(flops).mean()))
    x = np.log(flops / reference)
    start = _start(x, loss)
    solution = scipy.optimize.least_squares(
        lambda p: _law(p, x) - loss,
        start,
        jac=lambda p: _jacobian(p, x),
        x_scale="jac",
        method="lm",
        xtol=1e-14,
        ftol=1e-14,
        gtol=1e-14,
    )
    errors = float(solution.fun @ solution.fun)
    freedom = len(flops) - 3
    variance = errors / freedom if freedom else np.nan
    inverse = np.linalg.inv(np.linalg.qr(solution.jac, mode="r"))
    return ScalingLaw(
        parameters=solution.x,
        covariance=variance * (inverse @ inverse.T),
        reference=reference,
        residual=float(np.sqrt(variance)),
        r_squared=1.0 - errors / float(((loss - loss.mean()) ** 2).sum()),
        num_runs=len(flops),
    )


def leave_last_out(compute: ArrayLike, nll: ArrayLike) -> float:
    """NLL at the largest compute as the runs below it predict it. Raises ``UserError`` as ``fit`` does."""
    flops, loss = np.asarray(compute, dtype=np.float64), np.asarray(nll, dtype=np.float64)
    below = flops < flops.max()
    return float(fit(flops[below], loss[below])(flops.max()))


def read_runs(path: Path) -> pd.DataFrame:
    """Runs from a CSV: ``train_flops`` and ``nll``; where it has them ``name``, ``variant`` and ``held_out`` (0 or 1).

    Runs are called by the numbers of their rows where the file has no names. A variant is a ladder of its own, ``""``
    where the file has none. Held-out runs are predicted, not fitted. Other columns are left out.

    Returns:
        Columns name, variant, train_flops, nll, held_out; by variant as in the file, then by compute.

    Raises:
        UserError: naming file, line and column; the file cannot be read, lacks a column, or holds what is no positive
            number.
    """
    runs = read_table(path, "runs", _RUNS, others=True)
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
    """The law of each variant of ``read_runs``. Raises ``UserError`` naming the variant that has too few runs."""
    laws = {}
    for variant, rows in runs.groupby("variant", sort=False):
        where = f"variant '{variant}': " if variant else ""
        fitted = rows[~rows["held_out"]]
        count = fitted["train_flops"].nunique()
        if count < MIN_RUNS:
            raise UserError(
                f"{where}{count} different computes to fit; a law of three parameters needs at least {MIN_RUNS}"
            )
        try:
            laws[str(variant)] = fit(fitted["train_flops"], fitted["nll"])
        except UserError as error:
            raise UserError(f"{where}{error}") from error
    return laws


def predictions(runs: pd.DataFrame, laws: dict[str, ScalingLaw]) -> pd.DataFrame:
    """``runs`` with the ``predicted`` NLL, its interval ``low`` .. ``high`` for one run, and ``error_percent``."""
    rows = [laws[variant].predict(c) for variant, c in zip(runs["variant"], runs["train_flops"], strict=True)]
    table = runs.assign(predicted=[r.value for r in rows], low=[r.low for r in rows], high=[r.high for r in rows])
    return table.assign(error_percent=100.0 * (table["predicted"] / table["nll"] - 1.0))


def describe_laws(runs: pd.DataFrame, laws: dict[str, ScalingLaw]) -> list[dict[str, Any]]:
    """One mapping of plain values per variant: parameters with intervals, goodness of fit, predictions."""
    table = predictions(runs, laws)
    return [_describe(variant, law, table[table["variant"] == variant]) for variant, law in laws.items()]


def write_laws(folder: Path, laws: list[dict[str, Any]], source: str) -> None:
    """Write ``scaling.yaml`` from ``describe_laws``; ``source`` says where the runs are from."""
    with replacing(folder) as new:
        write_record(new / "scaling.yaml", {"source": source, "fits": laws, "environment": environment()})


def _describe(variant: str, law: ScalingLaw, rows: pd.DataFrame) -> dict[str, Any]:
    fitted = rows[~rows["held_out"]]
    last = fitted.iloc[-1]
    try:
        predicted: float | None = leave_last_out(fitted["train_flops"], fitted["nll"])
    except UserError:
        predicted = None  # the runs below the last follow no law of their own
    parameters = {"L_inf": law.irreducible, "A": law.amplitude, "alpha": law.exponent}
    return {
        "variant": variant,
        "law": "L(C) = L_inf + A C^-alpha",
        "num_runs": law.num_runs,
        "confidence": CONFIDENCE,
        "parameters": {name: [_plain(v) for v in (i.value, i.low, i.high)] for name, i in parameters.items()},
        "r_squared": _plain(law.r_squared, 8),
        "residual": _plain(law.residual),
        "leave_last_out": {
            "name": last["name"],
            "nll": _plain(last["nll"]),
            "predicted": None if predicted is None else _plain(predicted),
            "error_percent": None if predicted is None else _plain(100.0 * (predicted / last["nll"] - 1.0), 3),
        },
        "runs": [
            {
                "name": row["name"],
                "held_out": bool(row["held_out"]),
                **{key: _plain(row[key]) for key in ("train_flops", "nll", "predicted", "low", "high")},
                "error_percent": _plain(row["error_percent"], 3),
            }
            for _, row in rows.iterrows()
        ],
    }


def _law(parameters: Array, x: Array) -> Array:
    irreducible, log_amplitude, exponent = parameters
    return np.asarray(irreducible + np.exp(log_amplitude - exponent * x))


def _jacobian(parameters: Array, x: Array) -> Array:
    reducible = np.exp(parameters[1] - parameters[2] * x)
    return np.column_stack([np.ones_like(x), reducible, -x * reducible])


def _start(x: Array, loss: Array) -> Array:
    """Where the search starts: for an exponent the other two are linear, so the best exponent is a search in one."""

    def solve(exponent: float) -> tuple[float, Array]:
        basis = np.column_stack([np.ones_like(x), np.exp(-exponent * x)])
        linear = np.linalg.lstsq(basis, loss, rcond=None)[0]
        return float(((basis @ linear - loss) ** 2).sum()), linear

    best = int(np.argmin([solve(exponent)[0] for exponent in _EXPONENTS]))
    if not solve(_EXPONENTS[best])[1][1] > 0.0:
        raise UserError("the NLL does not fall with compute, so there is no power law to fit")
    if best in (0, len(_EXPONENTS) - 1):
        raise UserError(
            "the runs show no power law: the NLL falls along a straight line in log compute or faster"
            if best == 0
            else "the runs show no power law: the NLL falls in one step"
        )
    around = (_EXPONENTS[best - 1], _EXPONENTS[best + 1])
    exponent = float(scipy.optimize.minimize_scalar(lambda e: solve(e)[0], bounds=around, method="bounded").x)
    irreducible, amplitude = solve(exponent)[1]
    return np.array([irreducible, np.log(amplitude), exponent])


def _plain(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")
