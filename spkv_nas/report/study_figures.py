"""Figures of a layout search, as PNG and SVG: progress by sampler, what retraining made of it, and the front."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spkv_nas.artifacts.search_table import BASELINE
from spkv_nas.report.figures import (
    INK,
    LINE_COLOURS,
    LINE_STYLES,
    MUTED,
    drawing_style,
    label_points,
    new_figure,
    save_figure,
)

NAMES = ("search-progress", "search-retrained", "search-front")
_COLOURS = (INK, *LINE_COLOURS)  # baselines, then samplers
_MARKERS = ("o", "^", "v", "D")


def write_study_figures(folder: Path, rows: pd.DataFrame, progress: pd.DataFrame, cost: str | None) -> None:
    """Write those of ``NAMES`` that there is data for; a figure of an earlier search that has none now is removed.

    Args:
        rows: of ``spkv_nas.search.results.result_table``.
        progress: of ``spkv_nas.evaluation.guidance.best_so_far``.
        cost: name of the second objective.
    """
    figures = {
        "search-progress": progress_figure(progress, rows, cost),
        "search-retrained": retrained_figure(rows) if rows["full_delta_percent"].notna().any() else None,
        "search-front": None if cost is None else front_figure(rows, cost),
    }
    with drawing_style():
        for name, figure in figures.items():
            if figure is not None:
                save_figure(figure, folder, name)
            else:
                for suffix in (".png", ".svg"):
                    (folder / f"{name}{suffix}").unlink(missing_ok=True)


def progress_figure(progress: pd.DataFrame, rows: pd.DataFrame, cost: str | None) -> Figure:
    """The best so far against the number of trials: each study thin, the mean of a sampler's studies thick."""
    with drawing_style():
        figure, ax = new_figure(6.4, 4.2)
        for (sampler, some), colour, style in zip(
            progress.groupby("sampler", sort=False), LINE_COLOURS, LINE_STYLES, strict=False
        ):
            studies = some.pivot(index="trials", columns="seed", values="quality")
            if studies.shape[1] > 1:
                ax.plot(studies.index, studies, color=colour, linewidth=0.7, alpha=0.5)
            label = f"{sampler}, mean of {studies.shape[1]}" if studies.shape[1] > 1 else str(sampler)
            ax.plot(studies.index, studies.mean(axis=1), style, color=colour, linewidth=2, label=label)
        ax.set_xlabel("layouts scored")
        if cost is None:
            _draw_baselines(ax, rows[rows["sampler"] == BASELINE], progress)
            ax.set_ylabel("lowest zero-shot ΔNLL so far, %")
        else:
            ax.set_ylabel(f"hypervolume of NLL and {cost}")
        ax.legend(loc="best")
    return figure


def retrained_figure(rows: pd.DataFrame) -> Figure:
    """ΔNLL after full retraining against the zero-shot ΔNLL and against coverage, with standard errors."""
    with drawing_style():
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        kept = rows.dropna(subset="full_delta_percent").drop_duplicates("hash")
        for ax, column, name in (
            (left, "zero_shot_delta_percent", "zero-shot ΔNLL, %"),
            (right, "coverage_percent", "density coverage, %"),
        ):
            _scatter(ax, kept, column, "full_delta_percent", "full_standard_error")
            ax.set_xlabel(name)
        left.set_ylabel("ΔNLL after full retraining, %")
        left.legend(loc="best")
        for ax, column in ((left, "zero_shot_delta_percent"), (right, "coverage_percent")):
            starts = kept[kept["sampler"] == BASELINE]
            points = starts[[column, "full_delta_percent"]].to_numpy()
            label_points(figure, ax, points, starts["full_standard_error"].tolist(), starts["name"].tolist())
    return figure


def front_figure(rows: pd.DataFrame, cost: str) -> Figure:
    """Zero-shot ΔNLL against cost: every layout, and the front of each sampler as a line."""
    with drawing_style():
        figure, ax = new_figure(6.4, 4.4)
        _scatter(ax, rows, "cost", "zero_shot_delta_percent", None, alpha=0.35)
        for (_, some), colour in zip(rows.groupby("sampler", sort=False), _COLOURS, strict=False):
            ordered = some.sort_values(["cost", "zero_shot_delta_percent"])
            best = ordered["zero_shot_delta_percent"].cummin()
            ax.step(ordered["cost"], best, where="post", color=colour, linewidth=1.5)
        ax.set_xlabel(cost)
        ax.set_ylabel("zero-shot ΔNLL, %")
        ax.legend(loc="best")
    return figure


def _draw_baselines(ax: Axes, baselines: pd.DataFrame, progress: pd.DataFrame) -> None:
    """A line at each baseline's zero-shot ΔNLL; those too close for two names share a place."""
    highest = progress["quality"].max()
    near = 0.04 * (highest - progress["quality"].min())
    shown = baselines[baselines["zero_shot_delta_percent"] <= highest].sort_values("zero_shot_delta_percent")
    places: list[tuple[float, list[str]]] = []
    for name, value in zip(shown["name"], shown["zero_shot_delta_percent"], strict=True):
        ax.axhline(value, color=MUTED, linewidth=0.8, linestyle=":")
        if places and value - places[-1][0] < near:
            places[-1] = (value, [*places[-1][1], str(name)])
        else:
            places.append((value, [str(name)]))
    for value, names in places:
        at = (progress["trials"].max(), value)
        ax.annotate(", ".join(names), at, (0, 2), textcoords="offset points", ha="right", color=MUTED)


def _scatter(ax: Axes, rows: pd.DataFrame, across: str, up: str, error: str | None, *, alpha: float = 1.0) -> None:
    groups = zip(rows.groupby("sampler", sort=False), _COLOURS, _MARKERS, strict=False)
    for (sampler, some), colour, marker in groups:
        ax.errorbar(
            some[across], some[up], yerr=None if error is None else some[error], fmt=marker, color=colour,
            markersize=5, linewidth=1, alpha=alpha, label=str(sampler),
        )  # fmt: skip
