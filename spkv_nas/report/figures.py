"""The report's figures for papers and slides, as PNG and SVG. Same inputs, same bytes.

Drawn without pyplot, so no global figure state and no display are needed. SVG text stays text; element ids come from
a fixed salt and no date is written. Names are drawn literally (``$`` starts no formula).
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV
from spkv_nas.artifacts.density import DensityTable
from spkv_nas.base.files import write_atomic
from spkv_nas.report.charts import jitter
from spkv_nas.report.geometry import Box, place_labels
from spkv_nas.report.summary import Inputs, budget_curve, domain_profile, position_profile, short

INK, MUTED, ACCENT, CHOSEN = "#1b2330", "#5d6878", "#1f5fa8", "#d6006c"
LINE_STYLES = ("-", "--", "-.", ":")
LINE_COLOURS = (ACCENT, MUTED, "#b05a00", "#2e7d4f")
STYLE: Any = {  # settings of matplotlib
    "svg.hashsalt": "spkv-nas",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.grid": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "white",
    "legend.frameon": False,
}


def write_figures(folder: Path, inputs: Inputs) -> list[str]:
    """Write every figure that ``inputs`` has data for as ``<name>.png`` and ``<name>.svg``; returns the names."""
    makers: dict[str, Callable[[Inputs], Figure | None]] = {
        "density": lambda inputs: density_figure(inputs.table),
        "layouts": layouts_figure,
        "coverage-nll": nll_figure,
        "coverage-budget": budget_figure,
        "domains": lambda inputs: domains_figure(inputs.table),
        "positions": lambda inputs: positions_figure(inputs.table),
        "histogram": lambda inputs: histogram_figure(inputs.table),
    }
    written = []
    with drawing_style():
        for name, make in makers.items():
            figure = make(inputs)
            if figure is not None:
                save_figure(figure, folder, name)
                written.append(name)
    return written


def write_tau_sweep(folder: Path, rows: pd.DataFrame) -> None:
    """Write ``tau-sweep.png`` and ``.svg`` from the table of ``spkv_nas.evaluation.sweep``."""
    with drawing_style():
        save_figure(tau_sweep_figure(rows), folder, "tau-sweep")


def write_density_evolution(folder: Path, rows: pd.DataFrame) -> None:
    """Write ``density-evolution.png`` and ``.svg`` from a run's ``density-log.csv``."""
    with drawing_style():
        save_figure(density_evolution_figure(rows), folder, "density-evolution")


def write_palindrome(folder: Path, curves: pd.DataFrame, chance_nll: float) -> None:
    """Write ``palindrome.png`` and ``.svg`` from the curves of ``spkv_nas.training.palindrome.run``."""
    with drawing_style():
        save_figure(palindrome_figure(curves, chance_nll), folder, "palindrome")


def density_figure(table: DensityTable) -> Figure:
    """Heatmap of density, KV heads by layers, cividis fixed to [0, 1], cells labelled in percent."""
    cell = 0.42
    figure, ax = new_figure(max(6.0, 1.9 + cell * table.num_layers), 1.25 + cell * max(table.num_kv_heads, 3))
    _heatmap(ax, table, annotate=True)
    ax.set_title(f"Density, % of tokens kept (mean {100 * table.mean:.1f} %)", loc="left")
    beside = ax.inset_axes((1.0 + 0.35 / table.num_layers, 0, 0.35 / table.num_layers, 1))  # as high as the map
    bar = figure.colorbar(ax.collections[0], cax=beside, ticks=[0, 0.5, 1])
    bar.set_label("density")
    bar.outline.set_visible(False)
    return figure


def layouts_figure(inputs: Inputs) -> Figure | None:
    """Small multiples: the density heatmap once per layout, its global heads outlined and dotted."""
    if not inputs.layouts:
        return None
    table = inputs.table
    cell = 0.24
    columns = 1 if table.num_layers > 40 else 2
    rows = math.ceil(len(inputs.layouts) / columns)
    height = 0.95 + cell * table.num_kv_heads
    figure = Figure(figsize=(columns * max(4.6, 0.9 + cell * table.num_layers), rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, (name, layout) in zip(axes, inputs.layouts.items(), strict=False):
        _heatmap(ax, table, annotate=False)
        for layer, head in np.argwhere(layout.global_mask):
            ax.add_patch(
                Rectangle((layer + 0.06, head + 0.06), 0.88, 0.88, fill=False, edgecolor=CHOSEN, linewidth=1.8)
            )
        chosen = np.argwhere(layout.global_mask) + 0.5
        ax.plot(chosen[:, 0], chosen[:, 1], "o", color="white", markeredgecolor="black", markersize=3.2)
        covered = 100 * inputs.coverage[name]
        ax.set_title(
            f"{short(name, 28)}: {layout.num_global} of {layout.num_heads}, coverage {covered:.1f} %",
            loc="left",
            fontsize=9.5,
        )
    for ax in axes[len(inputs.layouts) :]:
        ax.set_axis_off()
    return figure


def nll_figure(inputs: Inputs) -> Figure | None:
    """Density coverage against NLL increase over full attention, with one standard error."""
    if inputs.comparison is None:
        return None
    known = inputs.comparison.dropna(subset=["coverage_percent", "delta_nll_percent"])
    if known.empty:
        return None
    figure, ax = new_figure(6.4, 4.2)
    ax.axhline(0, color=MUTED, linewidth=0.8)
    for _, row in known.iterrows():
        marker = {FULL_ATTENTION: "s", SP_KV: "D"}.get(row["strategy"], "o")
        error = row["delta_nll_standard_error"]
        ax.errorbar(
            row["coverage_percent"],
            row["delta_nll_percent"],
            yerr=None if math.isnan(error) else error,
            fmt=marker,
            color=ACCENT if marker == "o" else INK,
            markersize=7,
            capsize=3,
        )
    ax.set_xlim(-3, 106)
    ax.margins(y=0.12)
    ax.set_xlabel("density coverage, %")
    ax.set_ylabel("NLL increase over full attention, %")
    points = known[["coverage_percent", "delta_nll_percent"]].to_numpy()
    errors = known["delta_nll_standard_error"].fillna(0.0).tolist()
    label_points(figure, ax, points, errors, list(known["strategy"]))
    return figure


def budget_figure(inputs: Inputs) -> Figure | None:
    """Density coverage against the budget by strategy, with the layouts as points."""
    curve = budget_curve(inputs.table)
    if curve is None:
        return None
    figure, ax = new_figure(6.4, 4.2)
    if (sure := inputs.certainty) is not None:
        band = (100 * sure.curve["low"], 100 * sure.curve["high"])
        label = f"95 % interval, up to ± {sure.reach:.1f}"
        ax.fill_between(sure.curve["budget"], *band, color=ACCENT, alpha=0.3, linewidth=0, label=label)
        ax.axvline(sure.knee, color=INK, linewidth=1, linestyle="-.", label=f"knee: {sure.knee}")
    for name, style, colour in zip(curve.columns.drop("budget"), LINE_STYLES, LINE_COLOURS, strict=False):
        known = curve[["budget", name]].dropna()
        ax.plot(known["budget"], 100 * known[name], style, color=colour, linewidth=2, label=name)
    for name, layout in inputs.layouts.items():
        ax.plot(layout.num_global, 100 * inputs.coverage[name], "o", color=INK, markersize=5)
    ax.set_xlim(0, inputs.table.num_heads + 0.5)
    ax.set_ylim(0, 103)
    ax.set_xlabel("budget, global KV heads")
    ax.set_ylabel("density coverage, %")
    ax.legend(loc="lower right")
    return figure


def domains_figure(table: DensityTable) -> Figure:
    """One row per domain: every KV head a dot, the mean a bar."""
    profile = domain_profile(table)
    figure, ax = new_figure(6.4, 1.1 + 0.55 * len(profile))
    for i, domain in enumerate(table.domains):
        values = table.domain_density(domain).ravel()
        ax.plot(values, [i + jitter(k) for k in range(len(values))], "o", color=ACCENT, alpha=0.45, markersize=4)
        mean = float(profile["mean"].iloc[i])
        ax.vlines(mean, i - 0.36, i + 0.36, color=INK, linewidth=2.5)
        ax.annotate(f"{mean:.2f}", (mean, i - 0.38), ha="center", va="bottom", fontsize=9, color=INK)
    ax.set_yticks(range(len(profile)), [short(name, 24) for name in profile["domain"]])
    ax.set_ylim(len(profile) - 0.5, -0.75)
    ax.set_xlim(-0.02, 1.02)
    ax.set_xlabel("density, share of tokens kept (dots: KV heads; bar: mean)")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return figure


def positions_figure(table: DensityTable) -> Figure | None:
    """Mean density by token position, with the middle 80 % of KV heads as a band."""
    profile = position_profile(table)
    if profile is None:
        return None
    figure, ax = new_figure(6.4, 3.6)
    centre = (profile["start"] + profile["end"]) / 2
    ax.fill_between(
        centre, profile["low"], profile["high"], color=ACCENT, alpha=0.18, linewidth=0, label="80 % of heads"
    )
    ax.plot(centre, profile["mean"], "-o", color=ACCENT, markersize=4, linewidth=2, label="mean over heads")
    ax.set_xlim(0, float(profile["end"].max()))
    ax.set_ylim(0, 1)
    ax.set_xlabel("position of the token in its block")
    ax.set_ylabel(f"density at τ = {table.tau_of_positions:g}")
    ax.legend(loc="best")
    return figure


def histogram_figure(table: DensityTable) -> Figure:
    """Number of KV heads by density, in 20 bins."""
    figure, ax = new_figure(6.4, 3.6)
    ax.hist(table.density.ravel(), bins=20, range=(0, 1), color=ACCENT, edgecolor="white")
    ax.axvline(table.mean, color=INK, linewidth=1.5, linestyle="--", label=f"mean {table.mean:.2f}")
    ax.set_xlim(0, 1)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("density, share of tokens kept")
    ax.set_ylabel("KV heads")
    ax.legend(loc="best")
    return figure


def tau_sweep_figure(rows: pd.DataFrame) -> Figure:
    """Density against the change of NLL from open gates as tau moves, with one standard error.

    SP-KV paper, figure "Relationship between NLL and KV cache density".
    """
    figure, ax = new_figure(6.4, 4.2)
    density, change = 100 * rows["density"].to_numpy(), rows["delta_nll_percent"].to_numpy()
    errors = rows["delta_nll_standard_error"].to_numpy()
    ax.axhline(0, color=MUTED, linewidth=0.8)
    gated = rows["tau"].to_numpy() > 0
    ax.plot(density, change, "-", color=ACCENT, linewidth=1.2, alpha=0.6)
    ax.errorbar(
        density[gated],
        change[gated],
        yerr=errors[gated],
        fmt="o",
        color=ACCENT,
        markersize=5,
        capsize=2.5,
        elinewidth=1.2,
    )
    ax.plot(density[~gated], change[~gated], "s", color=INK, markersize=6)
    ax.set_xlim(-3, 106)
    ax.margins(y=0.12)
    ax.set_xlabel("density, % of keys kept (mean over heads)")
    ax.set_ylabel("NLL change from open gates, %")
    names = [f"τ {round(tau, 2 if 0.1 <= tau <= 0.9 else 3):g}" if tau else "open" for tau in rows["tau"]]
    label_points(figure, ax, np.column_stack([density, change]), errors.tolist(), names, curve=True)
    return figure


def density_evolution_figure(rows: pd.DataFrame) -> Figure:
    """Density of every head over training: all heads in grey, their median, and bands of quartiles and deciles.

    SP-KV paper, figure "Per-head gate density during phase 1". ``rows`` are a ``density-log.csv``.
    """
    heads = rows.pivot_table(index="step", columns=["layer", "kv_head"], values="density")
    steps, values = heads.index.to_numpy(), 100 * heads.to_numpy()
    figure, ax = new_figure(6.4, 4.0)
    ax.plot(steps, values, color=MUTED, linewidth=0.5, alpha=0.35)
    for low, high, alpha, name in ((10, 90, 0.15, "10 to 90 % of the heads"), (25, 75, 0.3, "25 to 75 %")):
        edges = np.percentile(values, (low, high), axis=1)
        ax.fill_between(steps, *edges, color=ACCENT, alpha=alpha, linewidth=0, label=name)
    ax.plot(steps, np.median(values, axis=1), color=ACCENT, linewidth=2, label="median")
    ax.set_ylim(-2, 102)
    ax.set_xlabel("step")
    ax.set_ylabel("density, % of keys kept")
    ax.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    return figure


def palindrome_figure(curves: pd.DataFrame, chance_nll: float) -> Figure:
    """Training loss by variant, and the mean utility and density of the gates, by step.

    SP-KV paper, appendix "Palindrome reversal with long instruction gap".

    Args:
        curves: columns variant, step, loss, mean_utility, density; the last two are NaN without gates.
        chance_nll: nats per output token of a model that sees nothing of the list.
    """
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.axhline(chance_nll, color=MUTED, linewidth=0.8, linestyle=":", label=f"chance, {chance_nll:.2f}")
    lines = zip(curves.groupby("variant", sort=False), LINE_STYLES, (INK, "#b05a00", ACCENT), strict=False)
    for (name, curve), style, colour in lines:
        left.plot(curve["step"], curve["loss"], style, color=colour, linewidth=1.8, label=name)
    left.set_ylim(0, 2.2 * chance_nll)
    left.set_ylabel("training loss, nats per output token")
    left.legend(loc="upper right")
    gated = curves.dropna(subset=["mean_utility"])
    right.plot(gated["step"], gated["mean_utility"], "-", color=ACCENT, linewidth=1.8, label="mean utility")
    right.plot(gated["step"], gated["density"], ":", color=MUTED, linewidth=1.8, label="density")
    right.set_ylim(0, 1.03)
    right.set_ylabel("SP-KV gates, mean over heads and tokens")
    right.legend(loc="lower left")
    for ax in (left, right):
        ax.set_xlim(0, None)
        ax.set_xlabel("step")
    return figure


@contextmanager
def drawing_style() -> Iterator[None]:
    """The settings that every figure is made and saved under."""
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # drawn as a box, still labelled
        yield


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _heatmap(ax: Axes, table: DensityTable, *, annotate: bool) -> None:
    sns.heatmap(
        table.density.T,
        ax=ax,
        vmin=0,
        vmax=1,
        cmap="cividis",
        square=True,
        cbar=False,
        linewidths=0.6 if annotate else 1.2,
        linecolor="white",
        annot=100 * table.density.T if annotate else None,
        fmt=".0f",
        annot_kws={"fontsize": 8.5},
        xticklabels=False,
        yticklabels=False,
    )
    every = 5 if not annotate and table.num_layers > 10 else 1
    layers = range(0, table.num_layers, every)
    ax.set_xticks([layer + 0.5 for layer in layers], [str(layer) for layer in layers])
    ax.set_yticks([head + 0.5 for head in range(table.num_kv_heads)], map(str, range(table.num_kv_heads)))
    ax.tick_params(length=0, rotation=0, labelsize=9 if annotate else 8)
    ax.set_xlabel("layer", fontsize=10 if annotate else 8.5)
    ax.set_ylabel("KV head", fontsize=10 if annotate else 8.5)


def label_points(
    figure: Figure,
    ax: Axes,
    points: NDArray[np.float64],
    errors: list[float],
    names: list[str],
    *,
    curve: bool = False,
    farthest: int | None = None,
) -> None:
    """Names beside their points, none on another; placed in points (1/72 inch), y downward.

    On a ``curve`` through the points, names keep off the line, and those without room are left out. A name moves at
    most ``farthest`` lines from its point; 8 by default, 1 on a curve.
    """
    figure.draw_without_rendering()  # settles the layout, so pixels are final
    scale = 72 / figure.dpi
    height = figure.bbox.height * scale
    pixels = ax.transData.transform(points) * scale
    box = ax.get_window_extent()
    raised = ax.transData.transform(points + np.column_stack([np.zeros(len(points)), errors])) * scale
    marks = [(float(x), float(height - y)) for x, y in pixels]
    texts = place_labels(
        marks,
        [short(name, 26) for name in names],
        (box.x0 * scale, height - box.y1 * scale, box.x1 * scale, height - box.y0 * scale),
        reach=(raised - pixels)[:, 1].tolist(),
        letter=5.8,
        line=13,
        avoid=_along(marks) if curve else (),
        farthest=farthest or (1 if curve else 8),
        omit=curve,
    )
    for point, (x, y), text in zip(points.tolist(), marks, texts, strict=True):
        if not text.text:
            continue
        ax.annotate(
            text.text,
            tuple(point),
            xytext=(text.x - x, y - text.y),
            textcoords="offset points",
            ha="left" if text.anchor == "start" else "right",
            va="center",
            fontsize=9,
            color=INK,
            annotation_clip=False,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
            arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6} if text.leader else None,
        )


def _along(marks: list[tuple[float, float]]) -> list[Box]:
    """Small boxes along the line through ``marks``."""
    boxes = []
    for (x0, y0), (x1, y1) in pairwise(marks):
        for share in np.linspace(0, 1, 2 + int(math.hypot(x1 - x0, y1 - y0) / 4)).tolist():
            x, y = x0 + share * (x1 - x0), y0 + share * (y1 - y0)
            boxes.append((x - 1.5, y - 1.5, x + 1.5, y + 1.5))
    return boxes


def save_figure(figure: Figure, folder: Path, name: str) -> None:
    """Write ``<name>.png`` and ``<name>.svg``."""
    for suffix, options in (("png", {"dpi": 160}), ("svg", {"metadata": {"Date": None, "Creator": "spkv-nas"}})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, **options)
        write_atomic(folder / f"{name}.{suffix}", buffer.getvalue())
