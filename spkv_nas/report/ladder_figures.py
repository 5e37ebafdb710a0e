"""The figures of the scaling ladder, as PNG and SVG: the fitted law, and FLOPs against model size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from spkv_nas.cost.scaling_law import CONFIDENCE, ScalingLaw
from spkv_nas.report.figures import (
    ACCENT,
    INK,
    LINE_COLOURS,
    LINE_STYLES,
    MUTED,
    drawing_style,
    label_points,
    new_figure,
    save_figure,
)

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def write_scaling(folder: Path, runs: pd.DataFrame, laws: dict[str, ScalingLaw]) -> None:
    """Write ``scaling.png`` and ``.svg`` from the runs and laws of ``spkv_nas.cost.scaling_law``."""
    with drawing_style():
        save_figure(scaling_figure(runs, laws), folder, "scaling")


def write_flops(folder: Path, rows: pd.DataFrame, context: int, density: float) -> None:
    """Write ``flops.png`` and ``.svg`` from the rows of ``spkv_nas.stages.cost.flops_figure_stage``."""
    with drawing_style():
        save_figure(flops_figure(rows, context, density), folder, "flops")


def scaling_figure(runs: pd.DataFrame, laws: dict[str, ScalingLaw]) -> Figure:
    """NLL against training compute, both logarithmic: runs, laws, and the interval of one run (shaded).

    Filled points are fitted, open ones held out. SP-KV paper, figure "Validation NLL and training compute".
    """
    figure, ax = new_figure(6.4, 4.4)
    ax.set_xscale("log")
    ax.set_yscale("log")
    flops = np.geomspace(runs["train_flops"].min() / 1.5, runs["train_flops"].max() * 1.5, 200)
    shown = np.concatenate([runs["nll"], *(law(flops) for law in laws.values())])
    floor, ceiling = shown.min() / 1.03, shown.max() * 1.03
    styles = zip(LINE_STYLES * len(laws), LINE_COLOURS * len(laws), strict=True)
    for (variant, law), (style, colour) in zip(laws.items(), styles, strict=False):
        rows = runs[runs["variant"] == variant]
        held_out = rows["held_out"].to_numpy()
        ends = [law.predict(c) for c in flops]
        low, high = (np.clip([getattr(e, end) for e in ends], floor, ceiling) for end in ("low", "high"))
        ax.fill_between(flops, low, high, color=colour, alpha=0.15, linewidth=0)
        ax.plot(flops, law(flops), style, color=colour, linewidth=1.5, label=_formula(variant, law))
        for chosen, face in ((~held_out, colour), (held_out, "white")):
            points = rows[chosen]
            ax.plot(points["train_flops"], points["nll"], "o", color=colour, markerfacecolor=face, markersize=5.5)
    if runs["held_out"].any():
        ax.plot([], [], "o", color=MUTED, markerfacecolor="white", markersize=5.5, label="held out of the fit")
    ax.set_xlabel("training compute, FLOPs")
    ax.set_ylabel("NLL, nats per token")
    ax.set_xlim(flops[0], flops[-1])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"10{str(round(np.log10(value))).translate(_RAISED)}"))
    _plain_log(ax, floor, ceiling)
    ax.legend(loc="upper right", title=f"shaded: {CONFIDENCE:.0%} interval of one run", title_fontsize=9, fontsize=9)
    if len(laws) == 1:
        points = runs[["train_flops", "nll"]].to_numpy(dtype=np.float64)
        label_points(figure, ax, points, [0.0] * len(runs), list(runs["name"]), curve=True, farthest=3)
    return figure


def flops_figure(rows: pd.DataFrame, context: int, density: float) -> Figure:
    """Forward FLOPs per token against model size, attention alone and in all, dense and at a density.

    SP-KV paper, figure "Per-token inference attention (left) and total (right) FLOPs".
    """
    figure = Figure(figsize=(9.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    size = rows["num_parameters"] / 1e9
    for ax, part in zip(panels, ("attention", "total"), strict=True):
        dense, sparse = rows[f"{part}_dense"] / 1e9, rows[f"{part}_sparse"] / 1e9
        ax.plot(size, dense, "-o", color=INK, markersize=4.5, linewidth=1.5, label="full attention")
        ax.plot(size, sparse, "--o", color=ACCENT, markersize=4.5, linewidth=1.5, label=f"density {density:g}")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_title(f"{part}, {context:,} tokens of context", loc="left")
        ax.set_xlabel("parameters without embeddings, billions")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("GFLOPs per token, forward")
    panels[0].legend(loc="upper left")
    return figure


def _formula(variant: str, law: ScalingLaw) -> str:
    text = f"{law.irreducible.value:.3g} + {law.amplitude.value:.3g} C^{-law.exponent.value:.3g}"
    text = text.replace("^-", "^\N{MINUS SIGN}").replace("+ -", "\N{MINUS SIGN} ")
    return f"{variant}: {text}" if variant else text


def _plain_log(ax: Axes, low: float, high: float) -> None:
    """Round ticks on a logarithmic axis that spans less than a decade or two."""
    ticks = [tick for tick in MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if tick > 0]
    ax.set_yticks([tick for tick in ticks if low <= tick <= high])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(low, high)
