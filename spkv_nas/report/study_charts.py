"""Geometry and rows of the page's part on a search: progress by sampler, retraining against zero-shot, best layouts."""

from __future__ import annotations

import math

import pandas as pd

from spkv_nas.artifacts.search_table import BASELINE
from spkv_nas.evaluation.guidance import best_layouts, best_so_far, correlations, guidance
from spkv_nas.report.charts import polyline
from spkv_nas.report.geometry import HEIGHT, WIDTH, Chart, Dot, make_axis, place_labels
from spkv_nas.report.summary import number, short, signed

_ROWS = 12
_KINDS = {BASELINE: "square", "density": "circle", "random": "diamond"}


def study_charts(rows: pd.DataFrame) -> list[Chart]:
    """The charts that there is data for, from the table of ``spkv_nas.artifacts.search_table.read_search``."""
    charts = (_progress_chart(rows), _retrained_chart(rows), _front_chart(rows))
    return [chart for chart in charts if chart is not None]


def study_rows(rows: pd.DataFrame) -> list[tuple[str, ...]]:
    """Formatted cells of the best layouts."""
    return [
        (
            str(row["name"]),
            number(row["num_global"], 0),
            number(row["coverage_percent"], 1),
            *([f"{row['cost']:.4g}"] if not math.isnan(row["cost"]) else []),
            _change(row["zero_shot_delta_percent"], row["zero_shot_standard_error"]),
            _change(row["short_delta_percent"], row["short_standard_error"]),
            _change(row["full_delta_percent"], row["full_standard_error"]),
        )
        for row in best_layouts(rows, _ROWS).to_dict("records")
    ]


def study_sentences(rows: pd.DataFrame) -> list[str]:
    """What each sampler reached, and how well the cheap measures order the layouts."""
    said = []
    for sampler, reached in guidance(rows).items():
        if (best := reached.retrained) is not None:
            said.append(
                f"{sampler}: retrained in full, the best of the short retraining, {best.layout}: "
                f"{_change(best.delta_nll_percent, best.standard_error)} %."
            )
    for pair, found in correlations(rows).items():
        if found is not None:
            low, high = found["interval"]
            said.append(
                f"Rank correlation of {pair} over {found['layouts']} layouts: {signed(found['rho'], 2)} "
                f"(95 % interval {signed(low, 2)} to {signed(high, 2)})."
            )
    return said


def _progress_chart(rows: pd.DataFrame) -> Chart:
    progress = best_so_far(rows)
    means = progress.groupby(["sampler", "trials"], sort=False)["quality"].mean().unstack("sampler", sort=False)
    has_cost = rows["cost"].notna().all()
    what = "Hypervolume of NLL and cost" if has_cost else "Lowest zero-shot ΔNLL so far, %"
    x = make_axis(0, float(progress["trials"].max()), 56, WIDTH - 16, "Layouts scored", exact=True)
    y = make_axis(float(min(0.0, means.min().min())), float(means.max().max()), HEIGHT - 48, 14, what)
    known = {str(sampler): column.dropna() for sampler, column in means.items()}
    return Chart(
        "search-progress",
        "What guidance was worth",
        f"{what}, mean over seeds, at the end: "
        + ", ".join(f"{sampler} {column.iloc[-1]:.3f}" for sampler, column in known.items())
        + ".",
        x,
        y,
        lines=[
            (style, polyline([(x(float(n)), y(float(v))) for n, v in column.items()]))
            for style, column in enumerate(known.values())
        ],
        legend=list(known),
    )


def _retrained_chart(rows: pd.DataFrame) -> Chart | None:
    known = rows.dropna(subset=["full_delta_percent"]).drop_duplicates("hash")
    if known.empty:
        return None
    value, error = known["full_delta_percent"], known["full_standard_error"]
    across = known["zero_shot_delta_percent"]
    x = make_axis(min(0.0, across.min()), across.max(), 56, WIDTH - 16, "Zero-shot ΔNLL, %")
    y = make_axis(
        min(0.0, (value - error).min()), (value + error).max(), HEIGHT - 48, 14, "ΔNLL after full retraining, %"
    )
    dots = [
        Dot(
            x(row.zero_shot_delta_percent),
            y(row.full_delta_percent),
            _KINDS.get(row.sampler, "circle"),
            f"{row.name}\nzero-shot {signed(row.zero_shot_delta_percent)} %\n"
            f"retrained {_change(row.full_delta_percent, row.full_standard_error)} %",
            (y(row.full_delta_percent - row.full_standard_error), y(row.full_delta_percent + row.full_standard_error)),
        )
        for row in known.drop(columns=["trial"]).itertuples(index=False)
    ]
    named = [i for i, sampler in enumerate(known["sampler"]) if sampler == BASELINE]
    return Chart(
        "search-retrained",
        "Does a score without training predict the retraining?",
        "Zero-shot and retrained ΔNLL: "
        + "; ".join(f"{short(n, 40)} {signed(a)} %, {signed(b)} %" for n, a, b in zip(
            known["name"], across, value, strict=True))
        + ".",
        x,
        y,
        dots=dots,
        texts=place_labels(
            [(dots[i].x, dots[i].y) for i in named],
            [short(str(known["name"].iloc[i]), 22) for i in named],
            (x.start, y.stop, x.stop, y.start),
            reach=[y(0.0) - y(float(error.iloc[i])) for i in named],
        ),
    )  # fmt: skip


def _front_chart(rows: pd.DataFrame) -> Chart | None:
    if rows["cost"].isna().any():
        return None
    change = rows["zero_shot_delta_percent"]
    x = make_axis(0.0, rows["cost"].max(), 56, WIDTH - 16, "Cost")
    y = make_axis(min(0.0, change.min()), change.max(), HEIGHT - 48, 14, "Zero-shot ΔNLL, %")
    samplers = [str(name) for name in rows["sampler"].unique() if name != BASELINE]
    lines = []
    for style, sampler in enumerate(samplers):
        some = rows[rows["sampler"] == sampler].sort_values(["cost", "zero_shot_delta_percent"])
        front = some[
            some["zero_shot_delta_percent"] < some["zero_shot_delta_percent"].cummin().shift(fill_value=math.inf)
        ]
        points = zip(front["cost"], front["zero_shot_delta_percent"], strict=True)
        lines.append((style, polyline([(x(cost), y(value)) for cost, value in points])))
    dots = [
        Dot(
            x(row.cost), y(row.zero_shot_delta_percent), _KINDS.get(row.sampler, "small"),
            f"{row.name}\n{row.num_global:.0f} heads, cost {row.cost:.4g}\n{signed(row.zero_shot_delta_percent)} %",
        )
        for row in rows[rows["sampler"] == BASELINE].itertuples(index=False)
    ]  # fmt: skip
    return Chart(
        "search-front",
        "What cost buys",
        f"Lowest zero-shot ΔNLL at each cost, by sampler: {', '.join(samplers)}. Dots are the baselines.",
        x,
        y,
        lines=lines,
        dots=dots,
        legend=samplers,
    )


def _change(percent: float, error: float) -> str:
    return "—" if math.isnan(percent) else f"{signed(percent)} ± {error:.3f}"
