"""Draw the palindrome comparison."""

from __future__ import annotations

import pandas as pd

from spkv_nas.report.axes import round_axis
from spkv_nas.report.chart import Chart, Dash, Line, Mark, Panels, Rule, Tone, numbers

_VARIANTS: tuple[tuple[Tone, Dash], ...] = (("ink", "solid"), ("second", "dashed"), ("accent", "dashdot"))


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
    for (variant, curve), (tone, dash) in zip(curves.groupby("variant", sort=False), _VARIANTS, strict=False):
        losses.append(Line(numbers(curve["step"]), numbers(curve["loss"]), str(variant), tone, dash, 2.2))
    # Gates
    gated = curves.dropna(subset=["mean_utility"])
    gated_steps = numbers(gated["step"])
    gates = (
        Line(gated_steps, numbers(gated["mean_utility"]), "mean utility", width=2.2),
        Line(gated_steps, numbers(gated["density"]), "density", "muted", "dotted", 2.2),
    )
    charts = (
        ("loss", "Training loss, nats per output token", 2 * chance_nll, tuple(losses)),
        ("gates", "SP-KV gates, mean over heads and tokens", 1.0, gates),
    )
    return Panels(
        "palindrome",
        tuple(
            Chart(f"palindrome-{name}", title, steps, round_axis(title, 0, high), marks)
            for name, title, high, marks in charts
        ),
    )
