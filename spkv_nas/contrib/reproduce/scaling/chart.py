"""Draw the fitted scaling law."""

from __future__ import annotations

import numpy as np
import pandas as pd

from spkv_nas.contrib.reproduce.scaling.scaling_law import CONFIDENCE, ScalingLaw
from spkv_nas.report.axes import decades_axis, log_axis
from spkv_nas.report.chart import SERIES, Band, Chart, Line, Mark, Points, numbers


def scaling_chart(runs: pd.DataFrame, laws: dict[str, ScalingLaw]) -> Chart:
    """Return NLL against training compute on logarithmic axes: runs, fitted laws, prediction intervals.

    Filled points are fitted, hollow ones held out. SP-KV paper, figure "Validation NLL and training compute".

    Args:
        runs: columns train_flops, nll, name, variant, held_out.
        laws: fitted law by variant.
    """
    # Compute grid and range of NLL
    flops = np.geomspace(runs["train_flops"].min() / 1.5, runs["train_flops"].max() * 1.5, 100)
    nlls = np.concatenate([runs["nll"], *(law(flops) for law in laws.values())])
    floor, ceiling = float(nlls.min()) / 1.03, float(nlls.max()) * 1.03
    compute_grid = numbers(flops)
    marks: list[Mark] = []
    points: list[Mark] = []
    # Law and interval of each variant
    for number, (variant, law) in enumerate(laws.items()):
        tone, dash = SERIES[number % len(SERIES)]
        intervals = [law.predict(compute) for compute in compute_grid]
        low, high = (
            numbers(np.clip([getattr(interval, side) for interval in intervals], floor, ceiling))
            for side in ("low", "high")
        )
        label = "" if number else f"{CONFIDENCE:.0%} interval of one run"
        marks += [
            Band(compute_grid, low, high, label, tone, 0.15),
            Line(compute_grid, numbers(law(flops)), _formula(variant, law), tone, dash, 1.8),
        ]
        # Fitted and held-out runs of the variant
        rows = runs[runs["variant"] == variant]
        held_out = rows["held_out"].to_numpy(dtype=bool)
        for selected, hollow in ((~held_out, False), (held_out, True)):
            if selected.any():
                subset = rows[selected]
                run_names = tuple(subset["name"].astype(str)) if len(laws) == 1 else ()
                xy = numbers(subset["train_flops"]), numbers(subset["nll"])
                points.append(Points(*xy, names=run_names, tone=tone, size=3.8, hollow=hollow))
    if runs["held_out"].any():
        points.append(Points((), (), label="held out of the fit", tone="muted", size=3.8, hollow=True))
    return Chart(
        "scaling",
        "NLL by training compute",
        decades_axis("Training compute, FLOPs", compute_grid[0], compute_grid[-1], powers=True),
        log_axis("NLL, nats per token", floor, ceiling),
        (*marks, *points),
    )


def _formula(variant: str, law: ScalingLaw) -> str:
    """Return a fitted law as text, such as ``2.1 + 3.4 C^-0.05``."""
    text = f"{law.irreducible.value:.3g} + {law.amplitude.value:.3g} C^{-law.exponent.value:.3g}"
    text = text.replace("^-", "^\N{MINUS SIGN}").replace("+ -", "\N{MINUS SIGN} ")
    return f"{variant}: {text}" if variant else text
