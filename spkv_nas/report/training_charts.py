"""Draw training: the density of every head as gates learn, and the palindrome comparison."""

from __future__ import annotations

import numpy as np
import pandas as pd

from spkv_nas.report.axes import round_axis
from spkv_nas.report.chart import Band, Chart, Dash, Line, Mark, Panels, Rule, Tone, numbers

_VARIANTS: tuple[tuple[Tone, Dash], ...] = (("ink", "solid"), ("second", "dashed"), ("accent", "dashdot"))


def density_evolution_chart(rows: pd.DataFrame) -> Chart:
    """Return the density of every head over training, with their median, quartiles and deciles.

    SP-KV paper, figure "Per-head gate density during phase 1".

    Args:
        rows: a run's ``density-log.csv``, columns step, layer, kv_head, density.
    """
    # Densities: [steps, heads], in percent
    heads = rows.pivot_table(index="step", columns=["layer", "kv_head"], values="density")
    steps, values = numbers(heads.index), 100 * heads.to_numpy()
    marks: list[Mark] = [Line(steps, numbers(column), tone="muted", width=0.6, opacity=0.35) for column in values.T]
    for low, high, opacity, label in ((10, 90, 0.15, "10 to 90 % of the heads"), (25, 75, 0.3, "25 to 75 %")):
        lower, upper = np.percentile(values, (low, high), axis=1)
        marks.append(Band(steps, numbers(lower), numbers(upper), label, opacity=opacity))
    median = numbers(np.median(values, axis=1))
    marks.append(Line(steps, median, "median"))
    return Chart(
        "density-evolution",
        "Density over training",
        f"The median density of a head goes from {median[0]:.1f} % at step {steps[0]:.0f} to {median[-1]:.1f} % at "
        f"step {steps[-1]:.0f}.",
        round_axis("Step", steps[0], steps[-1], exact=True),
        round_axis("Density, % of keys kept", 0, 100),
        tuple(marks),
    )


def palindrome_charts(curves: pd.DataFrame, chance_nll: float) -> Panels:
    """Return training loss by variant, and mean utility and density of the gates, by step.

    SP-KV paper, appendix "Palindrome reversal with long instruction gap".

    Args:
        curves: columns variant, step, loss, mean_utility, density; the last two are NaN without gates.
        chance_nll: NLL, in nats per output token, of a model that sees nothing of the list.
    """
    steps = round_axis("Step", 0, float(curves["step"].max()), exact=True)
    # Loss of each variant
    losses: list[Mark] = [Rule(chance_nll, f"chance {chance_nll:.2f}", vertical=False, tone="muted", dash="dotted")]
    ends = []
    for (variant, curve), (tone, dash) in zip(curves.groupby("variant", sort=False), _VARIANTS, strict=False):
        losses.append(Line(numbers(curve["step"]), numbers(curve["loss"]), str(variant), tone, dash, 2.2))
        ends.append(f"{variant} {curve['loss'].iloc[-1]:.3f}")
    # Gates
    gated = curves.dropna(subset=["mean_utility"])
    gated_steps = numbers(gated["step"])
    gates = (
        Line(gated_steps, numbers(gated["mean_utility"]), "mean utility", width=2.2),
        Line(gated_steps, numbers(gated["density"]), "density", "muted", "dotted", 2.2),
    )
    return Panels(
        "palindrome",
        (
            Chart(
                "palindrome-loss",
                "Training loss",
                f"Training loss at the end, nats per output token: {', '.join(ends)}; chance is {chance_nll:.2f}.",
                steps,
                round_axis("Training loss, nats per output token", 0, 2 * chance_nll),
                tuple(losses),
            ),
            Chart(
                "palindrome-gates",
                "Gates",
                "Mean utility and density of the gates over training.",
                steps,
                round_axis("SP-KV gates, mean over heads and tokens", 0, 1),
                gates,
            ),
        ),
    )
