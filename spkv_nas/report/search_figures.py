"""Figures of budgets, of how sure the choice of heads is, and of how far probes agree, as PNG and SVG."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from spkv_nas.proposal.agreement import short_labels
from spkv_nas.report.charts import colour
from spkv_nas.report.figures import ACCENT, INK, MUTED, drawing_style, new_figure, save_figure
from spkv_nas.report.summary import short


def write_budgets_figure(folder: Path, rows: pd.DataFrame, knee: int, *, num_domains: int) -> None:
    """Write ``budgets.png`` and ``.svg`` from the table of ``spkv_nas.proposal.requirements.budget_table``."""
    with drawing_style():
        save_figure(budgets_figure(rows, knee, num_domains=num_domains), folder, "budgets")


def write_stability_figure(folder: Path, probability: NDArray[np.float64], title: str) -> str:
    """Write ``stability.png`` and ``.svg``; returns the name."""
    with drawing_style():
        save_figure(stability_figure(probability, title), folder, "stability")
    return "stability"


def write_agreement_figure(folder: Path, rows: pd.DataFrame) -> None:
    """Write ``agreement.png`` and ``.svg`` from the table of ``spkv_nas.proposal.agreement.agreement``."""
    with drawing_style():
        save_figure(agreement_figure(rows), folder, "agreement")


def budgets_figure(rows: pd.DataFrame, knee: int, *, num_domains: int) -> Figure:
    """Density coverage against the number of global heads, with 95 % band, knee, and memory above if known."""
    figure, ax = new_figure(6.4, 4.2)
    budget, marker = rows["budget"].to_numpy(), "o" if len(rows) < 30 else None
    if rows["coverage_low"].notna().all():
        low, high = 100 * rows["coverage_low"], 100 * rows["coverage_high"]
        label = f"95 % interval, up to ± {(high - low).max() / 2:.1f}"
        ax.fill_between(budget, low, high, color=ACCENT, alpha=0.35, linewidth=0, label=label)
    ax.plot(budget, 100 * rows["coverage"], "-", marker=marker, color=ACCENT, linewidth=1, markersize=3, label="best")
    if num_domains > 1:
        ax.plot(budget, 100 * rows["worst_domain"], ":", color=INK, linewidth=1.5, label="its worst domain")
    ax.plot(budget, 100 * rows["random"], "--", color=MUTED, linewidth=1.5, label="random heads, expected")
    if budget[0] <= knee <= budget[-1]:
        ax.axvline(knee, color=INK, linewidth=1, linestyle="-.", label=f"knee: {knee}")
    ax.set_ylim(0, 103)
    ax.margins(x=0.03)
    ax.set_xlabel("budget, global KV heads")
    ax.set_ylabel("density coverage, %")
    ax.legend(loc="lower right")
    if rows["kv_bytes"].notna().all() and len(rows) > 1 and (rows["num_global"] == rows["budget"]).all():
        slope, start = np.polyfit(budget, rows["kv_bytes"] / 2**30, 1)
        above = ax.secondary_xaxis("top", functions=(lambda x: start + slope * x, lambda x: (x - start) / slope))
        above.set_xlabel("keys and values, GiB")
    return figure


def stability_figure(probability: NDArray[np.float64], title: str) -> Figure:
    """Heatmap of the chance [L, Hkv] that a head is chosen, in percent, cividis from 0 to 1."""
    layers, heads = probability.shape
    cell = 0.42
    figure, ax = new_figure(max(6.0, 1.9 + cell * layers), 1.25 + cell * max(heads, 3))
    _matrix(ax, probability.T)
    ax.set_xticks([layer + 0.5 for layer in range(layers)], map(str, range(layers)))
    ax.set_yticks([head + 0.5 for head in range(heads)], map(str, range(heads)))
    ax.set_xlabel("layer")
    ax.set_ylabel("KV head")
    ax.set_title(title, loc="left")
    return figure


def agreement_figure(rows: pd.DataFrame) -> Figure:
    """Jaccard index of the chosen heads and rank correlation of the densities, each as a matrix of all pairs."""
    labels = short_labels(rows)
    names = list(labels)
    size = 0.62 * len(names) + 1.6
    figure = Figure(figsize=(2 * size + 1.2, size + 0.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    titles = {
        "jaccard": f"{rows['budget'].iloc[0]} densest heads: Jaccard, % (chance {100 * rows['chance'].iloc[0]:.0f})",
        "spearman": "densities: Spearman, %",
    }
    for ax, (column, title) in zip((left, right), titles.items(), strict=True):
        values = np.eye(len(names))
        for row in rows.itertuples():
            i, k = names.index(row.first), names.index(row.second)
            values[i, k] = values[k, i] = getattr(row, column)
        _matrix(ax, values)
        shown = [short(label, 24) for label in labels.values()]
        ax.set_xticks(np.arange(len(names)) + 0.5, shown, rotation=35, ha="right", rotation_mode="anchor")
        ax.set_yticks(np.arange(len(names)) + 0.5, shown)
        ax.set_title(title, loc="left", fontsize=10)
    return figure


def _matrix(ax: Axes, values: NDArray[np.float64]) -> None:
    """``values`` as cividis cells from 0 to 1, each with its percentage; NaN stays empty."""
    sns.heatmap(
        values, ax=ax, vmin=0, vmax=1, cmap="cividis", square=True, cbar=False, linewidths=0.6, linecolor="white",
        xticklabels=False, yticklabels=False,
    )  # fmt: skip
    for row, column in np.argwhere(~np.isnan(values)):
        value = float(values[row, column])
        ink = colour(min(1.0, max(0.0, value)))[1]
        ax.text(column + 0.5, row + 0.5, f"{100 * value:.0f}", color=ink, ha="center", va="center", fontsize=8.5)
    ax.tick_params(length=0, rotation=0, labelsize=9)
