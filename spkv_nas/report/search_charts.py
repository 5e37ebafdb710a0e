"""Draw a layout search: zero-shot against retrained NLL, and NLL against cost."""

from __future__ import annotations

import math

import pandas as pd

from spkv_nas.artifacts.search_table import BASELINE
from spkv_nas.report.axes import round_axis, spread_axis
from spkv_nas.report.chart import SERIES, Chart, Line, Mark, Numbers, Panels, Points, Shape, Tone, numbers
from spkv_nas.report.formatting import capitalized, change, short, signed

_SHAPES: tuple[Shape, ...] = ("circle", "diamond", "triangle", "circle")
_CHANGE = "Zero-shot ΔNLL, %"


def search_charts(rows: pd.DataFrame, cost: str | None) -> list[Chart | Panels]:
    """Return the charts that have data; ``cost`` names the second objective, None without one."""
    charts = (retrained_charts(rows), None if cost is None else front_chart(rows, cost))
    return [chart for chart in charts if chart is not None]


def retrained_charts(rows: pd.DataFrame) -> Panels | None:
    """Return ΔNLL after full retraining against zero-shot ΔNLL and against coverage; None without any."""
    retrained = rows.dropna(subset=["full_delta_percent"]).drop_duplicates("hash")
    if retrained.empty:
        return None
    # Vertical axis
    value, error = retrained["full_delta_percent"], retrained["full_standard_error"].fillna(0.0)
    nll_axis = spread_axis("ΔNLL after full retraining, %", (value - error).min(), (value + error).max())
    predictors = (
        (
            "search-retrained-zero-shot",
            "zero_shot_delta_percent",
            "Zero-shot ΔNLL, %",
            "Zero-shot and retrained NLL",
            "Zero-shot and retrained ΔNLL",
        ),
        (
            "search-retrained-coverage",
            "coverage_percent",
            "Coverage, %",
            "Coverage and retrained NLL",
            "Coverage and retrained ΔNLL",
        ),
    )
    charts = []
    # One chart per predictor
    for name, column, axis, title, subject in predictors:
        values = retrained[column].dropna()
        if values.empty:
            continue
        low, high = float(values.min()), float(values.max())
        is_share = column == "coverage_percent"
        descriptions = (
            f"{short(str(layout), 40)} {signed(a, 1 if is_share else 3)} %, {signed(b)} %"
            for layout, a, b in zip(retrained["name"], retrained[column], value, strict=True)
        )
        predictor_axis = round_axis(axis, 0.0, high) if is_share else spread_axis(axis, low, high)
        charts.append(
            Chart(
                name,
                title,
                f"{subject}: {'; '.join(descriptions)}.",
                predictor_axis,
                nll_axis,
                _by_sampler(retrained, column),
                note="Bars: one standard error.",
            )
        )
    return Panels("search-retrained", tuple(charts))


def front_chart(rows: pd.DataFrame, cost: str) -> Chart:
    """Return zero-shot ΔNLL against cost: every layout, each sampler's front as a line, baselines by name."""
    value = rows["zero_shot_delta_percent"]
    # Dots and front of each sampler
    clouds: list[Mark] = []
    lines: list[Mark] = []
    samplers = [str(name) for name in rows["sampler"].unique() if name != BASELINE]
    for sampler, (tone, dash) in zip(samplers, SERIES, strict=False):
        trials = rows[rows["sampler"] == sampler].sort_values(["cost", "zero_shot_delta_percent"])
        xy = numbers(trials["cost"]), numbers(trials["zero_shot_delta_percent"])
        clouds.append(Points(*xy, layouts=tuple(map(str, trials["name"])), tone=tone, size=2.8, opacity=0.35))
        lines.append(Line(*_front(trials, float(rows["cost"].max())), sampler, tone, dash, 1.8))
    # Baselines
    baseline_rows = rows[rows["sampler"] == BASELINE]
    tips = (
        f"{name}\n{heads:.0f} heads, cost {row_cost:.4g}\n{signed(delta)} %"
        for name, heads, row_cost, delta in zip(
            baseline_rows["name"],
            baseline_rows["num_global"],
            baseline_rows["cost"],
            baseline_rows["zero_shot_delta_percent"],
            strict=True,
        )
    )
    baselines = Points(
        numbers(baseline_rows["cost"]),
        numbers(baseline_rows["zero_shot_delta_percent"]),
        tips=tuple(tips),
        names=tuple(short(str(name), 22) for name in baseline_rows["name"]),
        label="baseline",
        shape="square",
        tone="ink",
        size=4.5,
        farthest=3,
        optional=True,
    )
    return Chart(
        "search-front",
        "NLL against cost",
        f"Lowest zero-shot ΔNLL at each cost, by sampler: {', '.join(samplers)}. Squares are the baselines.",
        round_axis(capitalized(cost), 0.0, float(rows["cost"].max())),
        round_axis(_CHANGE, min(0.0, float(value.min())), float(value.max())),
        (*clouds, *lines, *([baselines] if len(baseline_rows) else [])),
        note="Lines: the front of each sampler. Dots: all layouts. Squares are baselines.",
        width=440.0,
        height=300.0,
    )


def _by_sampler(retrained: pd.DataFrame, column: str) -> tuple[Points, ...]:
    """Return a group of points per sampler, with the baselines named."""
    # Choose a shape and a tone for every sampler
    groups = []
    styles: dict[str, tuple[Shape, Tone]] = {BASELINE: ("square", "ink")}
    samplers = [str(name) for name in retrained["sampler"].unique() if name != BASELINE]
    styles |= {name: (shape, tone) for name, shape, (tone, _) in zip(samplers, _SHAPES, SERIES, strict=False)}
    # One group of points per sampler, with tips; only the baselines are labelled
    for sampler, (shape, tone) in styles.items():
        subset = retrained[retrained["sampler"] == sampler].dropna(subset=[column])
        if subset.empty:
            continue
        tips = tuple(
            f"{row['name']}\nzero-shot {signed(row['zero_shot_delta_percent'])} %\n"
            f"retrained {change(row['full_delta_percent'], row['full_standard_error'])} %"
            for row in subset.to_dict("records")
        )
        names = tuple(short(str(name), 22) for name in subset["name"]) if sampler == BASELINE else ()
        error = numbers(subset["full_standard_error"])
        groups.append(
            Points(
                numbers(subset[column]),
                numbers(subset["full_delta_percent"]),
                error,
                tips,
                names,
                label=sampler,
                shape=shape,
                tone=tone,
            )
        )
    return tuple(groups)


def _front(trials: pd.DataFrame, end: float) -> tuple[Numbers, Numbers]:
    """Return the lowest ΔNLL at each cost, as steps up to the cost ``end``."""
    ordered = trials.sort_values(["cost", "zero_shot_delta_percent"])
    lowest = math.inf
    x: list[float] = []
    y: list[float] = []
    for cost, value in zip(ordered["cost"], ordered["zero_shot_delta_percent"], strict=True):
        if value < lowest:
            if x:
                x.append(float(cost))
                y.append(lowest)
            x.append(float(cost))
            y.append(float(value))
            lowest = float(value)
    return (*x, end), (*y, lowest)
