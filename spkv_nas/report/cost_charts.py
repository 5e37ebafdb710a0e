"""Draw the scaling ladder: the fitted law, and FLOPs against model size."""

from __future__ import annotations

import numpy as np
import pandas as pd

from spkv_nas.cost.scaling_law import CONFIDENCE, ScalingLaw
from spkv_nas.report.axes import decades_axis, log_axis
from spkv_nas.report.chart import SERIES, Band, Chart, Dash, Line, Mark, Panels, Points, Tone, numbers


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
                points.append(
                    Points(*xy, names=run_names, farthest=3, optional=True, tone=tone, size=3.8, hollow=hollow)
                )
    if runs["held_out"].any():
        points.append(Points((), (), label="held out of the fit", tone="muted", size=3.8, hollow=True))
    return Chart(
        "scaling",
        "NLL by training compute",
        "Fitted: " + "; ".join(_formula(variant, law) for variant, law in laws.items()) + ".",
        decades_axis("Training compute, FLOPs", compute_grid[0], compute_grid[-1], powers=True),
        log_axis("NLL, nats per token", floor, ceiling),
        (*marks, *points),
    )


def flops_charts(rows: pd.DataFrame, context: int, density: float) -> Panels:
    """Return forward FLOPs per token against model size: attention and total, dense and at a density.

    SP-KV paper, figure "Per-token inference attention (left) and total (right) FLOPs".

    Args:
        rows: columns num_parameters, and attention_dense, attention_sparse, total_dense, total_sparse in FLOPs.
        context: tokens.
        density: of the sparse columns.
    """
    size = numbers(rows["num_parameters"], 1e-9)
    parts = ("attention", "total")
    columns = [f"{part}_{kind}" for part in parts for kind in ("dense", "sparse")]
    values = rows[columns].to_numpy(dtype=np.float64) / 1e9
    axes = (
        decades_axis("Parameters without embeddings, billions", min(size) / 1.2, max(size) * 1.2, multiples=(1, 2, 5)),
        decades_axis("GFLOPs per token, forward", values.min() / 1.3, values.max() * 1.3, multiples=(1, 2, 5)),
    )
    kinds: tuple[tuple[str, str, Tone, Dash], ...] = (
        ("dense", "full attention", "ink", "solid"),
        ("sparse", f"density {density:g}", "accent", "dashed"),
    )
    charts = []
    for part in parts:
        marks: list[Mark] = []
        for kind, label, tone, dash in kinds:
            gigaflops = numbers(rows[f"{part}_{kind}"], 1e-9)
            marks += [Line(size, gigaflops, label, tone, dash, 1.8), Points(size, gigaflops, tone=tone, size=3.0)]
        heading = f"{part}, {context:,} tokens of context"
        about = f"Forward GFLOPs per token, {heading}, against model size."
        charts.append(Chart(f"flops-{part}", f"FLOPs, {part}", about, *axes, tuple(marks), heading=heading))
    return Panels("flops", tuple(charts))


def _formula(variant: str, law: ScalingLaw) -> str:
    """Return a fitted law as text, such as ``2.1 + 3.4 C^-0.05``."""
    text = f"{law.irreducible.value:.3g} + {law.amplitude.value:.3g} C^{-law.exponent.value:.3g}"
    text = text.replace("^-", "^\N{MINUS SIGN}").replace("+ -", "\N{MINUS SIGN} ")
    return f"{variant}: {text}" if variant else text
