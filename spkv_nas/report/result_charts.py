"""Draw NLL against coverage, density and cache: of layouts, thresholds, pruning rules, searches; coverage by budget."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from spkv_nas.artifacts import score_kind, search_table
from spkv_nas.artifacts.comparison import BASELINES, DENSE, FULL_ATTENTION, SP_KV, counted_from
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.extras import missing_extra
from spkv_nas.cost.cache_cost import full_bytes
from spkv_nas.proposal import answers, coverage
from spkv_nas.report import chart
from spkv_nas.report.chart import SERIES, Chart, Line, Mark, Points, Rule, numbers, points
from spkv_nas.report.evidence import COMPARISON, Evidence, Result
from spkv_nas.report.formatting import DELTA_AXES, capitalized, change, short, signed
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.verdict import Verdict

SHAPES: dict[str, dict[str, Any]] = {  # style of what layouts are compared with
    SP_KV: {"label": "SP-KV", "shape": "diamond", "tone": "ink"},
    FULL_ATTENTION: {"label": "control", "shape": "square", "tone": "ink"},
    DENSE: {"label": "dense model as it is", "shape": "triangle", "tone": "ink"},
}
LAYOUT: dict[str, Any] = {"label": "layout"}
NOTE = "Lower is better. Bars: one standard error."
_NOTE_WITHOUT_BARS = "Lower is better."
_BUDGET = "Budget, global KV heads"
_MAX_VERTICES = 100  # of a line: more are not seen, but are most of the page of a large model
_DELTA = ("delta_nll_percent", "delta_nll_standard_error")


def coverage_nll_chart(
    comparison: pd.DataFrame, noun: str = score_kind.DENSITY.noun
) -> Chart | None:
    """Return coverage of a comparison's rows, summing ``noun``, against NLL increase; None if no row has both."""
    rows = comparison.dropna(subset=["coverage_percent", "delta_nll_percent"])
    baseline = counted_from(comparison)
    marks = []
    # Draw a group of points for each shape of marks
    for style in (LAYOUT, *SHAPES.values()):
        group = rows[[SHAPES.get(strategy, LAYOUT) is style for strategy in rows["strategy"]]]
        if not group.empty:
            tips = tuple(_tip(row, baseline) for _, row in group.iterrows())
            names = tuple(short(name, 22) for name in group["strategy"])
            marks.append(
                points(group, "coverage_percent", *_DELTA, tips=tips, names=names, **style)
            )
    if not marks:
        return None
    axes = (
        chart.round_axis(f"Coverage, % of all heads' {noun}", 0, 100, padded=True),
        chart.error_axis(DELTA_AXES[baseline], *(rows[column] for column in _DELTA)),
    )
    note = _note(rows["delta_nll_standard_error"])
    return Chart("coverage-nll", "Does coverage predict the NLL?", *axes, tuple(marks), note=note)


def tau_sweep_chart(rows: pd.DataFrame) -> Chart:
    """Return NLL against density as tau moves, as the paper's "Relationship between NLL and KV cache density"."""
    # Name the thresholds
    names = [
        f"τ {round(tau, 2 if 0.1 <= tau <= 0.9 else 3):g}" if tau else "open" for tau in rows["tau"]
    ]
    rows = rows.assign(density=100 * rows["density"], name=names)
    # Join all points, and mark open gates by another shape
    marks: list[Line | Points] = [_line(rows)]
    for group, style in (
        (rows[rows["tau"] > 0], {"label": "threshold τ"}),
        (rows[rows["tau"] == 0], {"label": "open gates", "shape": "square", "tone": "ink"}),
    ):
        if not group.empty:
            marks.append(
                points(group, "density", *_DELTA, names=tuple(group["name"]), size=4.0, **style)
            )
    axes = (
        chart.round_axis("Density, % of keys kept (mean over heads)", 0, 100, padded=True),
        chart.error_axis("NLL change from open gates, %", *(rows[column] for column in _DELTA)),
    )
    return Chart(
        "tau-sweep", "NLL against density", *axes, tuple(marks), note="Bars: one standard error."
    )


def baselines_chart(rows: pd.DataFrame) -> Chart:
    """Return density against NLL increase of pruning rules, and of SP-KV as tau moves; ``rows``: ``BASELINES``."""
    # Group the rules by their sinks, and set SP-KV apart
    rows = rows[rows["method"] != FULL_ATTENTION].assign(density=100 * rows["density"])
    is_spkv = rows["method"] == SP_KV
    spkv = rows[is_spkv & (rows["tau"] > 0)].sort_values("density")
    with_sinks = rows[~is_spkv & (rows["sinks"] > 0)]
    groups = (
        (
            rows[~is_spkv & ~(rows["sinks"] > 0)],
            {"label": "compressed, without sinks", "hollow": True},
        ),
        (with_sinks, {"label": "compressed, with sinks"}),
        (spkv, SHAPES[SP_KV]),
    )
    # Draw SP-KV as a line, and every group as points
    marks: list[Line | Points] = [_line(spkv, "ink")] if len(spkv) > 1 else []
    for group, style in groups:
        if not group.empty:
            names = tuple(
                f"τ {row.tau:g}" if row.method == SP_KV else row.method
                for row in group.itertuples()
            )
            tips = tuple(
                f"{name}, {row['sinks']:g} sinks\ndensity {row['density']:.1f} %\n{_delta(row)} %"
                for name, (_, row) in zip(names, group.iterrows(), strict=True)
            )
            if "hollow" in style and not with_sinks.empty:
                names = ()  # the dots with sinks lie beside them and have names
            marks.append(
                points(group, "density", *_DELTA, tips=tips, names=names, size=4.0, **style)
            )
    dots = pd.concat([group for group, _ in groups])
    return Chart(
        "baselines",
        "NLL against density, by compression rule",
        chart.round_axis(
            "Density, % of keys outside the window", 0.0, dots["density"].max(), padded=True
        ),
        chart.error_axis(
            "NLL change from the dense model, %", *(dots[column] for column in _DELTA)
        ),
        tuple(marks),
        note=NOTE,
        width=520.0,
        height=360.0,
    )


def _line(rows: pd.DataFrame, tone: chart.Tone = "accent") -> Line:
    """Return a thin line through the rows' points."""
    return Line(
        numbers(rows["density"]),
        numbers(rows["delta_nll_percent"]),
        width=1.5,
        opacity=0.6,
        tone=tone,
    )


def _delta(row: pd.Series) -> str:
    return change(*(row[column] for column in _DELTA))


def _tip(row: pd.Series, baseline: str) -> str:
    if row["strategy"] == baseline:
        return f"{baseline}\nthe reference, at 0"
    return f"{row['strategy']}\ncoverage {row['coverage_percent']:.1f} %\n{_delta(row)} %"


def cache_nll_chart(inputs: ReportInputs, verdict: Verdict) -> Chart | None:
    """Return KV-cache bytes against NLL increase, for the evidence behind the verdict; None if no loss was measured.

    Sizes are in percent of full attention's cache if the probe does not record the size of a head.
    """
    evidence = verdict.evidence
    if evidence is None:
        return None
    # Keep the layouts with a loss and a size
    known = [each for each in evidence.results if np.isfinite((each.delta, each.share)).all()]
    if not known:
        return None
    # Rows of layouts and of what they are compared with; sizes in MiB if the size of a head is known
    full = full_bytes(inputs.table, inputs.context)
    scale, unit = (100.0, "%") if full is None else (full / 2**20, "MiB")
    references = list(_references(inputs, evidence))
    marks: list[Rule | Points] = [
        Rule(scale, f"full: {scale:,.3g} {unit}", tone="muted", dash="dotted")
    ]
    for style, group in ((LAYOUT, known), *((SHAPES[each.name], [each]) for each in references)):
        marks.append(
            Points(
                numbers((each.share for each in group), scale),
                numbers(each.delta for each in group),
                numbers(each.error for each in group),
                tuple(_cache_tip(each, scale, unit) for each in group),
                tuple(short(each.name, 22) for each in group),
                **style,
            )
        )
    # Fit the axis to the error bars
    ends = [
        each.delta + sign * np.nan_to_num(each.error)
        for each in (*known, *references)
        for sign in (-1, 1)
    ]
    of_full = "% of full attention's" if full is None else unit
    return Chart(
        "cache-nll",
        "NLL against KV cache",
        chart.round_axis(
            f"KV cache of one sequence of {inputs.context:,} tokens, {of_full}",
            0.0,
            scale,
            padded=True,
        ),
        chart.spread_axis(DELTA_AXES[evidence.baseline], min(ends), max(ends)),
        tuple(marks),
        note=f"{capitalized(evidence.description)}. {_note(each.error for each in (*known, *references))}",
    )


def _note(errors: Iterable[float]) -> str:
    """Return the note of a chart, which names error bars only if it has any."""
    return NOTE if any(math.isfinite(error) for error in errors) else _NOTE_WITHOUT_BARS


def _cache_tip(result: Result, scale: float, unit: str) -> str:
    memory = f"{scale * result.share:,.3g} MiB, " if unit == "MiB" else ""
    cache = f"{memory}{100 * result.share:.1f} % of the full cache"
    return f"{result.name}\n{cache}\n{change(result.delta, result.error)} %"


def _references(inputs: ReportInputs, evidence: Evidence) -> Iterator[Result]:
    """Yield SP-KV, the control and the dense model, if they were measured in the same way."""
    if evidence.source != COMPARISON or inputs.comparison is None:
        return
    rows = inputs.comparison[inputs.comparison["strategy"].isin(BASELINES)]
    for row in rows.dropna(subset=["delta_nll_percent", "density_percent"]).to_dict("records"):
        change = row["delta_nll_percent"], row["delta_nll_standard_error"]
        yield Result(
            row["strategy"],
            *change,
            share=inputs.cache_share(min(1.0, row["density_percent"] / 100)),
        )


def coverage_budget_chart(
    table: HeadScores,
    layouts: Mapping[str, Layout],
    covered: Mapping[str, float],
    certainty: coverage.Certainty | None,
) -> Chart | None:
    """Return coverage against budget by strategy, with the layouts as dots; None if no head keeps anything.

    ``covered`` is each layout's coverage, in [0, 1]; ``certainty`` gives the band of the curve of highest scores.
    """
    curve = answers.coverage_by_budget(table)
    if curve is None:
        return None
    marks: list[Mark] = []
    note = "Lines: the best possible, the expected random, and the layer patterns, at every budget."
    # Confidence band and knee
    if certainty is not None:
        interval_label = f"95 % interval, up to ± {certainty.reach:.1f}"
        budget, low, high = (numbers(certainty.curve[name]) for name in ("budget", "low", "high"))
        marks += [
            chart.Band(budget, numbers(low, 100), numbers(high, 100), interval_label, opacity=0.3),
            Rule(certainty.knee, f"knee {certainty.knee}"),
        ]
        band = f"Band: {interval_label} points, over documents."
        note += f" {band} Knee: beyond it each further head adds less than average."
    # A line per strategy
    names = [str(name) for name in curve.columns if name != "budget"]
    for name, (tone, dash) in zip(names, SERIES, strict=False):
        line = curve[["budget", name]].dropna()
        line = line.iloc[
            np.unique(np.linspace(0, len(line) - 1, _MAX_VERTICES).round().astype(int))
        ]
        marks.append(Line(numbers(line["budget"]), numbers(line[name], 100), name, tone, dash))
    # A dot per layout
    heads = {
        name: layout.num_global for name, layout in layouts.items() if not math.isnan(covered[name])
    }
    if heads:
        tips = tuple(
            f"{name}\n{heads[name]} heads, coverage {100 * covered[name]:.1f} %" for name in heads
        )
        dots = numbers(heads.values()), numbers((covered[name] for name in heads), 100)
        marks.append(Points(*dots, tips=tips, tone="ink", label="layout"))
        note += " Dots: the layouts of this report."
    return Chart(
        "coverage-budget",
        "Coverage vs budget",
        chart.round_axis(_BUDGET, 0, table.num_heads, exact=True),
        chart.round_axis(f"{table.measure.title} coverage, %", 0, 100),
        tuple(marks),
        note=note,
    )


_SHAPES: tuple[chart.Shape, ...] = ("circle", "diamond", "triangle", "circle")
_CHANGE = "Zero-shot ΔNLL, %"
SEARCH_FIGURES = ("search-retrained", "search-front")


def search_charts(rows: pd.DataFrame, cost: str | None) -> list[Chart | chart.Panels]:
    """Return the charts that have data; ``cost`` names the second objective, None without one."""
    charts = (retrained_charts(rows), None if cost is None else front_chart(rows, cost))
    return [each for each in charts if each is not None]


def write_study_figures(folder: Path, rows: pd.DataFrame, cost: str | None) -> None:
    """Write the figures of ``search.csv`` that have data, remove the others; ``cost`` names a second objective."""
    from spkv_nas.report.plot import save_chart

    charts = search_charts(rows, cost)
    for each in charts:
        save_chart(folder, each)
    for name in set(SEARCH_FIGURES) - {each.name for each in charts}:
        _remove(folder, name)


def retrained_charts(rows: pd.DataFrame) -> chart.Panels | None:
    """Return ΔNLL after full retraining against zero-shot ΔNLL and against coverage; None without any."""
    retrained = rows.dropna(subset=["full_delta_percent"]).drop_duplicates("hash")
    if retrained.empty:
        return None
    # Axes
    value = retrained["full_delta_percent"]
    error = retrained["full_standard_error"].fillna(0.0)
    nll_axis = chart.spread_axis(
        "ΔNLL after full retraining, %", (value - error).min(), (value + error).max()
    )
    low, high = retrained["zero_shot_delta_percent"].agg(["min", "max"])
    predictors = {
        "zero-shot": ("zero_shot_delta_percent", chart.spread_axis(_CHANGE, low, high)),
        "coverage": (
            "coverage_percent",
            chart.round_axis("Coverage, %", 0, retrained["coverage_percent"].max()),
        ),
    }
    # Draw a chart for each predictor that was measured
    charts = []
    for name, (column, axis) in predictors.items():
        if retrained[column].notna().any():
            title = f"{capitalized(name)} and retrained NLL"
            marks = _by_sampler(retrained, column)
            note = "Bars: one standard error."
            charts.append(
                Chart(f"search-retrained-{name}", title, axis, nll_axis, marks, note=note)
            )
    return chart.Panels("search-retrained", tuple(charts))


def front_chart(rows: pd.DataFrame, cost: str) -> Chart:
    """Return zero-shot ΔNLL against cost: every layout, each sampler's front as a line, baselines by name."""
    value = rows["zero_shot_delta_percent"]
    # Dots and front of each sampler
    clouds: list[Mark] = []
    lines: list[Mark] = []
    samplers = [str(name) for name in rows["sampler"].unique() if name != search_table.BASELINE]
    for sampler, (tone, dash) in zip(samplers, SERIES, strict=False):
        trials = rows[rows["sampler"] == sampler].sort_values(["cost", "zero_shot_delta_percent"])
        xy = numbers(trials["cost"]), numbers(trials["zero_shot_delta_percent"])
        clouds.append(
            Points(*xy, layouts=tuple(map(str, trials["name"])), tone=tone, size=2.8, opacity=0.35)
        )
        lines.append(Line(*_front(trials, float(rows["cost"].max())), sampler, tone, dash, 1.8))
    # Baselines
    baselines = rows[rows["sampler"] == search_table.BASELINE]
    tips = tuple(
        f"{row['name']}\n{row['num_global']:.0f} heads, cost {row['cost']:.4g}\n"
        f"{signed(row['zero_shot_delta_percent'])} %"
        for row in baselines.to_dict("records")
    )
    xy = numbers(baselines["cost"]), numbers(baselines["zero_shot_delta_percent"])
    squares = Points(
        *xy,
        tips=tips,
        names=_names(baselines),
        label="baseline",
        shape="square",
        tone="ink",
        size=4.5,
    )
    return Chart(
        "search-front",
        "NLL against cost",
        chart.round_axis(capitalized(cost), 0.0, float(rows["cost"].max())),
        chart.round_axis(_CHANGE, min(0.0, float(value.min())), float(value.max())),
        (*clouds, *lines, *([squares] if len(baselines) else [])),
        description=f"Lowest zero-shot ΔNLL at each cost, by sampler: {', '.join(samplers)}.",
        note="Lines: the front of each sampler. Dots: all layouts. Squares are baselines.",
        width=440.0,
        height=300.0,
    )


def _by_sampler(retrained: pd.DataFrame, column: str) -> tuple[Points, ...]:
    """Return a group of points per sampler, each of a shape and a tone, with the baselines named."""
    samplers = [
        str(name) for name in retrained["sampler"].unique() if name != search_table.BASELINE
    ]
    styles = [("square", "ink"), *zip(_SHAPES, (tone for tone, _ in SERIES), strict=True)]
    groups = []
    for sampler, (shape, tone) in zip((search_table.BASELINE, *samplers), styles, strict=False):
        subset = retrained[retrained["sampler"] == sampler].dropna(subset=[column])
        if subset.empty:
            continue
        tips = tuple(
            f"{row['name']}\ncoverage {row['coverage_percent']:.1f} %, zero-shot "
            f"{signed(row['zero_shot_delta_percent'])} %\n"
            f"retrained {change(row['full_delta_percent'], row['full_standard_error'])} %"
            for row in subset.to_dict("records")
        )
        names = _names(subset) if sampler == search_table.BASELINE else ()
        columns = column, "full_delta_percent", "full_standard_error"
        groups.append(
            points(subset, *columns, tips=tips, names=names, label=sampler, shape=shape, tone=tone)
        )
    return tuple(groups)


def _names(rows: pd.DataFrame) -> tuple[str, ...]:
    return tuple(short(str(name), 22) for name in rows["name"])


def _front(trials: pd.DataFrame, end: float) -> tuple[chart.Numbers, chart.Numbers]:
    """Return the lowest ΔNLL at each cost, as steps up to the cost ``end``."""
    ordered = trials.sort_values(["cost", "zero_shot_delta_percent"])
    lowest = ordered["zero_shot_delta_percent"].cummin()
    is_lower = lowest != lowest.shift()
    return (*numbers(np.repeat(ordered.loc[is_lower, "cost"], 2)[1:]), end), numbers(
        np.repeat(lowest[is_lower], 2)
    )


def save_figure(folder: Path, drawn: Chart | chart.Panels) -> Path | None:
    """Write a table's picture, return its PNG; without drawing libraries remove an older one, warn, return None."""
    try:
        from spkv_nas.report.plot import save_chart

        save_chart(folder, drawn)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        warnings.warn(f"without the figure {drawn.name}: {missing}", stacklevel=2)
        _remove(folder, drawn.name)
        return None
    return folder / f"{drawn.name}.png"


def _remove(folder: Path, name: str) -> None:
    for suffix in (".png", ".svg", ".pdf"):
        (folder / f"{name}{suffix}").unlink(missing_ok=True)
