"""Fit the scaling law ``L(C) = L_inf + A C^-alpha`` of NLL against training compute, with confidence intervals.

SP-KV paper, section "Scaling analysis". C is training compute in FLOPs; L_inf is the irreducible NLL. The fit minimises
squared errors of the NLL. To decorrelate the parameters, the amplitude is fitted as a logarithm, at the geometric mean
of the runs' compute.

Intervals use Student's t with n - 3 degrees of freedom on the linearised covariance. On simulated ladders (the paper's
law, noise 0.006), 95 % intervals covered the true value in 96 to 97 % of 400 draws with 11 runs, 95 to 96 % with 6,
92 to 95 % with 5; bootstrapped residuals in 92 to 93 % with 11. Intervals cover the scatter of runs about the law, not
a failure of the law beyond them; predictions of held-out runs test that.
"""

from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy  # imports its subpackages on first use
from numpy.typing import ArrayLike

from spkv_nas.base import arrays, assets, console, limits, records, replace, tables, version
from spkv_nas.base.errors import UserError
from spkv_nas.base.workspace import Workspace
from spkv_nas.report import chart, result_charts

_RUNS = (
    tables.Column("name", default=""),
    tables.Column("variant", default=""),
    tables.Column("train_flops", "number", above=0, high=1e100),
    tables.Column("nll", "number", above=0, high=limits.MAX_SHOWN),
    tables.Column("held_out", default="0", choices=("0", "1")),
)
MIN_RUNS = 4
CONFIDENCE = 0.95
# Outside, the law is indistinguishable from a logarithm or a step
_EXPONENTS = np.geomspace(1e-3, 3.0, 60)
_TOLERANCE = 1e-14  # relative, of the fit's parameters, errors and gradient


@dataclass(frozen=True)
class Interval:
    """Estimates and the ends of their confidence intervals, all of one shape."""

    value: arrays.Float
    low: arrays.Float
    high: arrays.Float


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted scaling law.

    ``parameters`` [3] are L_inf, the log of the amplitude at ``reference`` FLOPs, and alpha; ``covariance`` is theirs,
    ``residual`` the standard deviation of runs about the law.
    """

    parameters: arrays.Float
    covariance: arrays.Float
    reference: float
    residual: float
    r_squared: float
    num_runs: int

    def __call__(self, compute: ArrayLike) -> arrays.Float:
        """Return the NLL at ``compute`` FLOPs."""
        return _law(self._x(compute), *self.parameters)

    @property
    def irreducible(self) -> Interval:
        """Return L_inf."""
        return self._of_sum([1.0, 0.0, 0.0])

    @property
    def exponent(self) -> Interval:
        """Return alpha."""
        return self._of_sum([0.0, 0.0, 1.0])

    @property
    def amplitude(self) -> Interval:
        """Return A, the reducible NLL at 1 FLOP, with a wide interval, as 1 FLOP is far from the runs."""
        log = self._of_sum([0.0, 1.0, np.log(self.reference)])
        # With few runs, A may be unbounded
        with np.errstate(over="ignore"):
            return Interval(np.exp(log.value), np.exp(log.low), np.exp(log.high))

    def predict(self, compute: ArrayLike) -> Interval:
        """Predict the NLL of one more run at ``compute`` FLOPs, with an interval that includes the runs' scatter."""
        x = self._x(compute)
        return self._interval(
            _law(x, *self.parameters), _jacobian(x, *self.parameters), self.residual
        )

    def _of_sum(self, weights: ArrayLike) -> Interval:
        """Return the interval of a sum of the parameters with ``weights`` [3]."""
        return self._interval(np.dot(weights, self.parameters), np.asarray(weights))

    def _interval(
        self, value: arrays.Float, gradient: arrays.Float, scatter: float = 0.0
    ) -> Interval:
        """Return the interval of a value by its ``gradient`` [..., 3]; the deviation ``scatter`` adds to the fit's."""
        deviation = np.sqrt(((gradient @ self.covariance) * gradient).sum(-1) + scatter**2)
        half_width = scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, self.num_runs - 3) * deviation
        return Interval(value, value - half_width, value + half_width)

    def _x(self, compute: ArrayLike) -> arrays.Float:
        """Return log(compute / reference)."""
        return np.asarray(np.log(np.asarray(compute, dtype=np.float64) / self.reference))


def fit(compute: ArrayLike, nll: ArrayLike) -> ScalingLaw:
    """Fit the law to runs of ``compute`` FLOPs and ``nll``, both [n], by least squares.

    Raises ``UserError`` if there are fewer than ``MIN_RUNS`` different computes, or the runs do not follow such a law:
    the NLL does not fall, or falls along or below a straight line in log compute, so that L_inf cannot be estimated.
    """
    flops = np.asarray(compute, dtype=np.float64)
    loss = np.asarray(nll, dtype=np.float64)
    number = len(np.unique(flops))
    if number < MIN_RUNS:
        raise UserError(
            f"{number} different amounts of compute; a law of three parameters needs at least "
            f"{MIN_RUNS}"
        )
    # Fit from the initial parameters
    reference = float(np.exp(np.log(flops).mean()))
    x = np.log(flops / reference)
    parameters, covariance = scipy.optimize.curve_fit(
        _law,
        x,
        loss,
        _start(x, loss),
        jac=_jacobian,
        method="lm",
        xtol=_TOLERANCE,
        ftol=_TOLERANCE,
        gtol=_TOLERANCE,
    )
    # Describe how well it fits
    errors = float(((_law(x, *parameters) - loss) ** 2).sum())
    variation = float(((loss - loss.mean()) ** 2).sum())
    residual = (errors / (len(flops) - 3)) ** 0.5
    r_squared = 1.0 - errors / variation
    return ScalingLaw(parameters, covariance, reference, residual, r_squared, num_runs=len(flops))


def read_runs(path: Path) -> pd.DataFrame:
    """Read runs from a CSV file with ``train_flops`` and ``nll``, and optionally ``name``, ``variant``, ``held_out``.

    Runs without names are numbered by row. Each variant is a ladder of its own (default ``""``). Held-out runs (1, else
    0) are predicted but not fitted. Variants are as in the file, then sorted by compute.
    """
    runs = tables.read_table(path, "runs", _RUNS, others=True)
    if (runs["name"] == "").all():
        runs["name"] = [str(number) for number in range(1, len(runs) + 1)]
    variant_order, _ = pd.factorize(runs["variant"])
    runs = runs.assign(held_out=runs["held_out"] == "1", _order=variant_order)
    runs = runs.sort_values(["_order", "train_flops"], ignore_index=True)
    return runs.drop(columns="_order")


def fit_runs(runs: pd.DataFrame) -> dict[str, ScalingLaw]:
    """Fit the law of each variant of ``read_runs``; ``UserError`` if one has too few runs or follows no law."""
    laws = {}
    for variant, rows in runs.groupby("variant", sort=False):
        fitted = rows[~rows["held_out"]]
        try:
            laws[str(variant)] = fit(fitted["train_flops"], fitted["nll"])
        except UserError as error:
            raise UserError(f"variant '{variant}': {error}" if variant else str(error)) from error
    return laws


def describe_laws(runs: pd.DataFrame, laws: dict[str, ScalingLaw]) -> list[dict[str, Any]]:
    """Describe each variant's law as plain values: parameters with intervals, goodness of fit, predictions.

    The interval of a prediction is that of one run.
    """
    described = []
    for variant, law in laws.items():
        parameters = {"L_inf": law.irreducible, "A": law.amplitude, "alpha": law.exponent}
        rows = runs.loc[runs["variant"] == variant, ["name", "held_out", "train_flops", "nll"]]
        predicted = law.predict(rows["train_flops"])
        numbers = rows[["train_flops", "nll"]].assign(
            predicted=predicted.value, low=predicted.low, high=predicted.high
        )
        errors = (100.0 * (predicted.value / rows["nll"] - 1.0)).map(partial(_plain, digits=3))
        rounded = numbers.map(_plain)
        described_runs = rows.assign(**rounded, error_percent=errors)
        described.append(
            {
                "variant": variant,
                "law": "L(C) = L_inf + A C^-alpha",
                "num_runs": law.num_runs,
                "confidence": CONFIDENCE,
                "parameters": {
                    name: [_plain(end) for end in astuple(interval)]
                    for name, interval in parameters.items()
                },
                "r_squared": _plain(law.r_squared, 8),
                "residual": _plain(law.residual),
                "runs": described_runs.to_dict("records"),
            }
        )
    return described


def _law(
    x: arrays.Float, irreducible: float, log_amplitude: float, exponent: float
) -> arrays.Float:
    """Evaluate the law at ``x`` = log(compute / reference), of any shape."""
    return np.asarray(irreducible + np.exp(log_amplitude - exponent * x))


def _jacobian(
    x: arrays.Float, _irreducible: float, log_amplitude: float, exponent: float
) -> arrays.Float:
    """Return the derivatives of ``_law`` by its parameters, [..., 3]."""
    reducible = np.exp(log_amplitude - exponent * x)
    return np.stack([np.ones_like(x), reducible, -x * reducible], -1)


def _start(x: arrays.Float, loss: arrays.Float) -> arrays.Float:
    """Return initial parameters of the fit: the best exponent of a grid, and the other two, linear given it."""
    # Solve for the linear parameters at each exponent
    powers = np.exp(-_EXPONENTS[:, None] * x)
    bases = np.stack([np.ones_like(powers), powers], -1)  # [exponents, n, 2]
    linear = np.linalg.pinv(bases) @ loss
    residuals = bases @ linear[..., None] - loss[:, None]
    best = int((residuals**2).sum((1, 2)).argmin())
    irreducible, amplitude = linear[best]
    # Reject data without a power law
    if not amplitude > 0.0:
        raise UserError("the NLL does not fall with compute, so there is no power law to fit")
    if best == 0:
        raise UserError(
            "the runs show no power law: the NLL falls along a straight line in log compute or "
            "faster"
        )
    if best == len(_EXPONENTS) - 1:
        raise UserError("the runs show no power law: the NLL falls in one step")
    return np.array([irreducible, np.log(amplitude), _EXPONENTS[best]])


def _plain(value: float, digits: int = 6) -> float:
    """Round to significant digits."""
    return float(f"{value:.{digits}g}")


@dataclass(frozen=True)
class ScalingResult:
    """Laws as of ``describe_laws``, and their figure; None where the plotting library is not installed."""

    name: str
    laws: list[dict[str, Any]]
    folder: Path
    figure: Path | None


def scaling(workspace: Workspace, name: str, file: Path | None) -> ScalingResult:
    """Fit the scaling law to runs, by default the paper's, and write law and figure to ``reports/<name>/``."""
    runs = read_runs(file or assets.PAPER_TABLE)
    laws = fit_runs(runs)
    described = describe_laws(runs, laws)
    workspace.check_writable()
    folder = workspace.report_dir(name)
    record = {
        "source": name if file is None else str(file),
        "fits": described,
        "environment": version.environment(),
    }
    with replace.replacing(folder) as new:
        records.write_record(new / "scaling.yaml", record)
    figure = result_charts.save_figure(folder, scaling_chart(runs, laws))
    return ScalingResult(name, described, folder, figure)


def show(result: ScalingResult) -> None:
    """Print the fitted scaling laws and their predictions of held-out runs."""
    for law in result.laws:
        # Fitted parameters
        title = f"{result.name}, {law['variant']}" if law["variant"] else result.name
        title = console.escape(f"{title}: {law['law']}")
        grid = console.Table("", "value", f"{law['confidence']:.0%} interval", title=title)
        for parameter, (value, low, high) in law["parameters"].items():
            grid.add_row(parameter, f"{value:.4g}", f"{low:.4g} .. {high:.4g}")
        console.out.print(grid)
        residual = f"residual standard deviation {law['residual']:.4f}"
        console.out.print(f"R² {law['r_squared']:.5f} over {law['num_runs']} runs; {residual}")
        # Predictions of held-out runs
        for run in law["runs"]:
            if not run["held_out"]:
                continue
            interval = f"{run['low']:.4f} .. {run['high']:.4f}"
            console.out.print(
                f"held out: {console.escape(run['name'])} predicted {run['predicted']:.4f} "
                f"({interval}), measured {run['nll']:.4f} ({run['error_percent']:+.2f} %)"
            )
    console.print_path("scaling", result.figure or result.folder / "scaling.yaml")


def scaling_chart(runs: pd.DataFrame, laws: dict[str, ScalingLaw]) -> chart.Chart:
    """Return NLL against training compute on logarithmic axes: runs, fitted laws, prediction intervals.

    Filled points are fitted, hollow ones held out. SP-KV paper, figure "Validation NLL and training compute". ``runs``
    has the columns of ``read_runs``.
    """
    # Compute grid and range of NLL
    flops = np.geomspace(runs["train_flops"].min() / 1.5, runs["train_flops"].max() * 1.5, 100)
    nlls = np.concatenate([runs["nll"], *(law(flops) for law in laws.values())])
    floor = float(nlls.min()) / 1.03
    ceiling = float(nlls.max()) * 1.03
    compute_grid = chart.numbers(flops)
    marks: list[chart.Mark] = []
    points: list[chart.Mark] = []
    # Law and interval of each variant
    for number, (variant, law) in enumerate(laws.items()):
        tone, dash = chart.SERIES[number % len(chart.SERIES)]
        interval = law.predict(flops)
        low = chart.numbers(np.clip(interval.low, floor, ceiling))
        high = chart.numbers(np.clip(interval.high, floor, ceiling))
        label = "" if number else f"{CONFIDENCE:.0%} interval of one run"
        marks += [
            chart.Band(compute_grid, low, high, label, tone, 0.15),
            chart.Line(
                compute_grid, chart.numbers(law(flops)), _formula(variant, law), tone, dash, 1.8
            ),
        ]
        # Fitted and held-out runs of the variant
        for is_held_out, rows in runs[runs["variant"] == variant].groupby("held_out"):
            points.append(
                chart.Points(
                    chart.numbers(rows["train_flops"]),
                    chart.numbers(rows["nll"]),
                    names=tuple(rows["name"].astype(str)) if len(laws) == 1 else (),
                    tone=tone,
                    size=3.8,
                    hollow=bool(is_held_out),
                )
            )
    if runs["held_out"].any():
        points.append(
            chart.Points((), (), label="held out of the fit", tone="muted", size=3.8, hollow=True)
        )
    return chart.Chart(
        "scaling",
        "NLL by training compute",
        chart.decades_axis(
            "Training compute, FLOPs", compute_grid[0], compute_grid[-1], powers=True
        ),
        chart.log_axis("NLL, nats per token", floor, ceiling),
        (*marks, *points),
    )


def _formula(variant: str, law: ScalingLaw) -> str:
    """Return a fitted law as text, such as ``2.1 + 3.4 C^-0.05``."""
    text = f"{law.irreducible.value:.3g} + {law.amplitude.value:.3g} C^{-law.exponent.value:.3g}"
    text = text.replace("^-", "^\N{MINUS SIGN}").replace("+ -", "\N{MINUS SIGN} ")
    return f"{variant}: {text}" if variant else text
