"""Draw a layout search: zero-shot against retrained NLL, and NLL against cost."""

import numpy as np
import pandas as pd

from spkv_nas.artifacts.search_table import BASELINE
from spkv_nas.report import axes, formatting
from spkv_nas.report.chart import SERIES, Chart, Line, Mark, Numbers, Panels, Points, Shape, numbers, points

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
    # Axes
    value, error = retrained["full_delta_percent"], retrained["full_standard_error"].fillna(0.0)
    nll_axis = axes.spread_axis("ΔNLL after full retraining, %", (value - error).min(), (value + error).max())
    low, high = retrained["zero_shot_delta_percent"].agg(["min", "max"])
    predictors = {
        "zero-shot": ("zero_shot_delta_percent", axes.spread_axis(_CHANGE, low, high)),
        "coverage": ("coverage_percent", axes.round_axis("Coverage, %", 0, retrained["coverage_percent"].max())),
    }
    # Draw a chart for each predictor that was measured
    charts = []
    for name, (column, axis) in predictors.items():
        if retrained[column].notna().any():
            title, marks = f"{formatting.capitalized(name)} and retrained NLL", _by_sampler(retrained, column)
            note = "Bars: one standard error."
            charts.append(Chart(f"search-retrained-{name}", title, axis, nll_axis, marks, note=note))
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
    baselines = rows[rows["sampler"] == BASELINE]
    tips = tuple(
        f"{row['name']}\n{row['num_global']:.0f} heads, cost {row['cost']:.4g}\n"
        f"{formatting.signed(row['zero_shot_delta_percent'])} %"
        for row in baselines.to_dict("records")
    )
    xy = numbers(baselines["cost"]), numbers(baselines["zero_shot_delta_percent"])
    squares = Points(*xy, tips=tips, names=_names(baselines), label="baseline", shape="square", tone="ink", size=4.5)
    return Chart(
        "search-front",
        "NLL against cost",
        axes.round_axis(formatting.capitalized(cost), 0.0, float(rows["cost"].max())),
        axes.round_axis(_CHANGE, min(0.0, float(value.min())), float(value.max())),
        (*clouds, *lines, *([squares] if len(baselines) else [])),
        description=f"Lowest zero-shot ΔNLL at each cost, by sampler: {', '.join(samplers)}.",
        note="Lines: the front of each sampler. Dots: all layouts. Squares are baselines.",
        width=440.0,
        height=300.0,
    )


def _by_sampler(retrained: pd.DataFrame, column: str) -> tuple[Points, ...]:
    """Return a group of points per sampler, each of a shape and a tone, with the baselines named."""
    samplers = [str(name) for name in retrained["sampler"].unique() if name != BASELINE]
    styles = [("square", "ink"), *zip(_SHAPES, (tone for tone, _ in SERIES), strict=True)]
    groups = []
    for sampler, (shape, tone) in zip((BASELINE, *samplers), styles, strict=False):
        subset = retrained[retrained["sampler"] == sampler].dropna(subset=[column])
        if subset.empty:
            continue
        tips = tuple(
            f"{row['name']}\ncoverage {row['coverage_percent']:.1f} %, zero-shot "
            f"{formatting.signed(row['zero_shot_delta_percent'])} %\n"
            f"retrained {formatting.change(row['full_delta_percent'], row['full_standard_error'])} %"
            for row in subset.to_dict("records")
        )
        names = _names(subset) if sampler == BASELINE else ()
        columns = column, "full_delta_percent", "full_standard_error"
        groups.append(points(subset, *columns, tips=tips, names=names, label=sampler, shape=shape, tone=tone))
    return tuple(groups)


def _names(rows: pd.DataFrame) -> tuple[str, ...]:
    return tuple(formatting.short(str(name), 22) for name in rows["name"])


def _front(trials: pd.DataFrame, end: float) -> tuple[Numbers, Numbers]:
    """Return the lowest ΔNLL at each cost, as steps up to the cost ``end``."""
    ordered = trials.sort_values(["cost", "zero_shot_delta_percent"])
    lowest = ordered["zero_shot_delta_percent"].cummin()
    is_lower = lowest != lowest.shift()
    return (*numbers(np.repeat(ordered.loc[is_lower, "cost"], 2)[1:]), end), numbers(np.repeat(lowest[is_lower], 2))
