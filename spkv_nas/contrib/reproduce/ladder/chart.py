"""Draw the FLOPs of the model ladder against model size."""

from __future__ import annotations

import numpy as np
import pandas as pd

from spkv_nas.report.axes import decades_axis
from spkv_nas.report.chart import Chart, Dash, Line, Mark, Panels, Points, Tone, numbers


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
    # Give all charts the same axes
    axes = (
        decades_axis("Parameters without embeddings, billions", min(size) / 1.2, max(size) * 1.2, multiples=(1, 2, 5)),
        decades_axis("GFLOPs per token, forward", values.min() / 1.3, values.max() * 1.3, multiples=(1, 2, 5)),
    )
    kinds: tuple[tuple[str, str, Tone, Dash], ...] = (
        ("dense", "full attention", "ink", "solid"),
        ("sparse", f"density {density:g}", "accent", "dashed"),
    )
    # Draw a chart for each part
    charts = []
    for part in parts:
        marks: list[Mark] = []
        for kind, label, tone, dash in kinds:
            gigaflops = numbers(rows[f"{part}_{kind}"], 1e-9)
            marks += [Line(size, gigaflops, label, tone, dash, 1.8), Points(size, gigaflops, tone=tone, size=3.0)]
        heading = f"{part}, {context:,} tokens of context"
        charts.append(Chart(f"flops-{part}", heading, *axes, tuple(marks), heading=heading))
    return Panels("flops", tuple(charts))
