"""Draw NLL against coverage, density and cache: of layouts, thresholds, pruning rules, searches; coverage by budget."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

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
from spkv_nas.report.chart import (
    SERIES,
    Chart,
    Line,
    Mark,
    Panels,
    Points,
    Rule,
    Style,
    numbers,
    points,
)
from spkv_nas.report.evidence import COMPARISON, Evidence, Result
from spkv_nas.report.formatting import DELTA_AXES, capitalized, change, short, signed
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.verdict import Verdict

# Styles of layouts, and of what they are compared with
LAYOUT = Style("layout")
STYLES = {
    SP_KV: Style("SP-KV", "diamond", "ink"),
    FULL_ATTENTION: Style("control", "square", "ink"),
    DENSE: Style("dense model as it is", "triangle", "ink"),
}
NOTE = "Lower is better. Bars: one standard error."
_NOTE_WITHOUT_BARS = "Lower is better."
_BUDGET = "Budget, global KV heads"
_MAX_VERTICES = 100  # of a line: more are not seen, but are most of the page of a large model
_DELTA = ("delta_nll_percent", "delta_nll_standard_error")
_SHAPES: tuple[chart.Shape, ...] = ("circle", "diamond", "triangle", "circle")
_CHANGE = "Zero-shot ΔNLL, %"
SEARCH_FIGURES = ("search-retrained", "search-front")


def coverage_nll_chart(
    comparison: pd.DataFrame, noun: str = score_kind.DENSITY.noun
) -> Chart | None:
    """Return coverage of a comparison's rows, summing ``noun``, against NLL increase; None if no row has both."""
    rows = comparison.dropna(subset=["coverage_percent", "delta_nll_percent"])
    baseline = counted_from(comparison)
    # Draw a group of points for each style
    marks = []
    for style in (LAYOUT, *STYLES.values()):
        group = rows[[STYLES.get(strategy, LAYOUT) is style for strategy in rows["strategy"]]]
        if group.empty:
            continue
        tips = tuple(_tip(row, baseline) for _, row in group.iterrows())
        names = tuple(short(name, 22) for name in group["strategy"])
        columns = ("coverage_percent", *_DELTA)
        marks.append(points(group, columns, style, tips=tips, names=names))
    if not marks:
        return None
    return Chart(
        "coverage-nll",
        "Does coverage predict the NLL?",
        chart.round_axis(f"Coverage, % of all heads' {noun}", 0, 100, padded=True),
        _delta_axis(DELTA_AXES[baseline], rows),
        tuple(marks),
        note=_note(rows["delta_nll_standard_error"]),
    )


def _delta_axis(title: str, rows: pd.DataFrame) -> chart.Axis:
    """Return an axis over the changes of NLL in a table, with their error bars."""
    column, error = _DELTA
    return chart.error_axis(title, rows[column], rows[error])


def tau_sweep_chart(rows: pd.DataFrame) -> Chart:
    """Return NLL against density as tau moves, as the paper's "Relationship between NLL and KV cache density"."""
    names = [_tau_name(tau) for tau in rows["tau"]]
    rows = rows.assign(density=100 * rows["density"], name=names)
    # Join all points, and mark open gates by another shape
    marks: list[Line | Points] = [_line(rows)]
    groups = (
        (rows[rows["tau"] > 0], Style("threshold τ")),
        (rows[rows["tau"] == 0], Style("open gates", "square", "ink")),
    )
    for group, style in groups:
        if not group.empty:
            columns = ("density", *_DELTA)
            marks.append(points(group, columns, style, names=tuple(group["name"]), size=4.0))
    return Chart(
        "tau-sweep",
        "NLL against density",
        chart.round_axis("Density, % of keys kept (mean over heads)", 0, 100, padded=True),
        _delta_axis("NLL change from open gates, %", rows),
        tuple(marks),
        note="Bars: one standard error.",
    )


def _tau_name(tau: float) -> str:
    """Return the name of a threshold, with a third digit near 0 and 1, where thresholds lie close."""
    if not tau:
        return "open"
    digits = 2 if 0.1 <= tau <= 0.9 else 3
    return f"τ {round(tau, digits):g}"


def baselines_chart(rows: pd.DataFrame) -> Chart:
    """Return density against NLL increase of pruning rules, and of SP-KV as tau moves; ``rows``: ``BASELINES``."""
    # Group the rules by their sinks, and set SP-KV apart
    rows = rows[rows["method"] != FULL_ATTENTION].assign(density=100 * rows["density"])
    is_spkv = rows["method"] == SP_KV
    has_sinks = rows["sinks"] > 0
    spkv = rows[is_spkv & (rows["tau"] > 0)].sort_values("density")
    with_sinks = rows[~is_spkv & has_sinks]
    without_sinks = rows[~is_spkv & ~has_sinks]
    # Draw SP-KV as a line, and every group as points
    marks: list[Line | Points] = []
    if len(spkv) > 1:
        marks.append(_line(spkv, "ink"))
    groups = (
        (without_sinks, Style("compressed, without sinks", hollow=True)),
        (with_sinks, Style("compressed, with sinks")),
        (spkv, STYLES[SP_KV]),
    )
    for group, style in groups:
        if group.empty:
            continue
        names = tuple(
            f"τ {row.tau:g}" if row.method == SP_KV else row.method for row in group.itertuples()
        )
        tips = tuple(
            f"{name}, {row['sinks']:g} sinks\ndensity {row['density']:.1f} %\n{_delta(row)} %"
            for name, (_, row) in zip(names, group.iterrows(), strict=True)
        )
        # The dots with sinks lie beside those without and have names
        if style.hollow and not with_sinks.empty:
            names = ()
        marks.append(points(group, ("density", *_DELTA), style, tips=tips, names=names, size=4.0))
    dots = pd.concat([group for group, _ in groups])
    highest = dots["density"].max()
    return Chart(
        "baselines",
        "NLL against density, by compression rule",
        chart.round_axis("Density, % of keys outside the window", 0.0, highest, padded=True),
        _delta_axis("NLL change from the dense model, %", dots),
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
    column, error = _DELTA
    return change(row[column], row[error])


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
    known = [
        result
        for result in evidence.results
        if np.isfinite(result.delta) and np.isfinite(result.share)
    ]
    if not known:
        return None
    # Sizes are in MiB if the size of a head is known
    full = full_bytes(inputs.table, inputs.context)
    scale = 100.0 if full is None else full / 2**20
    unit = "%" if full is None else "MiB"
    title = f"KV cache of one sequence of {inputs.context:,} tokens"
    title += ", % of full attention's" if full is None else f", {unit}"
    # Draw layouts and what they are compared with
    references = list(_references(inputs, evidence))
    groups = [(LAYOUT, known)]
    groups += [(STYLES[reference.name], [reference]) for reference in references]
    marks: list[Rule | Points] = [
        Rule(scale, f"full: {scale:,.3g} {unit}", tone="muted", dash="dotted")
    ]
    marks += [_cache_points(group, style, scale, unit) for style, group in groups]
    everything = [*known, *references]
    note = _note(result.error for result in everything)
    return Chart(
        "cache-nll",
        "NLL against KV cache",
        chart.round_axis(title, 0.0, scale, padded=True),
        _loss_axis(DELTA_AXES[evidence.baseline], everything),
        tuple(marks),
        note=f"{capitalized(evidence.description)}. {note}",
    )


def _loss_axis(title: str, results: Sequence[Result]) -> chart.Axis:
    """Return an axis over losses and their error bars."""
    lows = []
    highs = []
    for result in results:
        bar = np.nan_to_num(result.error)
        lows.append(result.delta - bar)
        highs.append(result.delta + bar)
    return chart.spread_axis(title, min(lows), max(highs))


def _cache_points(results: Sequence[Result], style: Style, scale: float, unit: str) -> Points:
    """Return losses by the size of the cache, of which full attention's is ``scale``."""
    return Points(
        numbers((result.share for result in results), scale),
        numbers(result.delta for result in results),
        numbers(result.error for result in results),
        tips=tuple(_cache_tip(result, scale, unit) for result in results),
        names=tuple(short(result.name, 22) for result in results),
        label=style.label,
        shape=style.shape,
        tone=style.tone,
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
        density = min(1.0, row["density_percent"] / 100)
        yield Result(
            row["strategy"],
            row["delta_nll_percent"],
            row["delta_nll_standard_error"],
            share=inputs.cache_share(density),
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
        marks += _certainty_marks(certainty, interval_label)
        band = f"Band: {interval_label} points, over documents."
        note += f" {band} Knee: beyond it each further head adds less than average."
    # A line per strategy
    names = [str(name) for name in curve.columns if name != "budget"]
    for name, (tone, dash) in zip(names, SERIES, strict=False):
        line = _thinned(curve[["budget", name]].dropna())
        marks.append(Line(numbers(line["budget"]), numbers(line[name], 100), name, tone, dash))
    # A dot per layout
    heads = {
        name: layout.num_global for name, layout in layouts.items() if not math.isnan(covered[name])
    }
    if heads:
        tips = tuple(
            f"{name}\n{number} heads, coverage {100 * covered[name]:.1f} %"
            for name, number in heads.items()
        )
        shares = numbers((covered[name] for name in heads), 100)
        marks.append(Points(numbers(heads.values()), shares, tips=tips, tone="ink", label="layout"))
        note += " Dots: the layouts of this report."
    return Chart(
        "coverage-budget",
        "Coverage vs budget",
        chart.round_axis(_BUDGET, 0, table.num_heads, exact=True),
        chart.round_axis(f"{table.measure.title} coverage, %", 0, 100),
        tuple(marks),
        note=note,
    )


def _certainty_marks(certainty: coverage.Certainty, label: str) -> list[Mark]:
    """Return the interval of the curve of highest scores, and its knee."""
    curve = certainty.curve
    budget = numbers(curve["budget"])
    low = numbers(curve["low"], 100)
    high = numbers(curve["high"], 100)
    return [
        chart.Band(budget, low, high, label, opacity=0.3),
        Rule(certainty.knee, f"knee {certainty.knee}"),
    ]


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    """Return at most ``_MAX_VERTICES`` rows, evenly spread, with the first and the last."""
    places = np.linspace(0, len(rows) - 1, _MAX_VERTICES).round().astype(int)
    return rows.iloc[np.unique(places)]


def search_charts(rows: pd.DataFrame, cost: str | None) -> list[Chart | Panels]:
    """Return the charts that have data; ``cost`` names the second objective, None without one."""
    retrained = retrained_charts(rows)
    charts: list[Chart | Panels] = [] if retrained is None else [retrained]
    if cost is not None:
        charts.append(front_chart(rows, cost))
    return charts


def write_study_figures(folder: Path, rows: pd.DataFrame, cost: str | None) -> None:
    """Write the figures of ``search.csv`` that have data, remove the others; ``cost`` names a second objective."""
    from spkv_nas.report.plot import save_chart

    charts = search_charts(rows, cost)
    for drawn in charts:
        save_chart(folder, drawn)
    for name in set(SEARCH_FIGURES) - {drawn.name for drawn in charts}:
        _remove(folder, name)


def retrained_charts(rows: pd.DataFrame) -> Panels | None:
    """Return ΔNLL after full retraining against zero-shot ΔNLL and against coverage; None without any."""
    retrained = rows.dropna(subset=["full_delta_percent"]).drop_duplicates("hash")
    if retrained.empty:
        return None
    # Axes
    value = retrained["full_delta_percent"]
    error = retrained["full_standard_error"].fillna(0.0)
    lowest = (value - error).min()
    highest = (value + error).max()
    nll_axis = chart.spread_axis("ΔNLL after full retraining, %", lowest, highest)
    zero_shot = retrained["zero_shot_delta_percent"]
    change_axis = chart.spread_axis(_CHANGE, zero_shot.min(), zero_shot.max())
    coverage_axis = chart.round_axis("Coverage, %", 0, retrained["coverage_percent"].max())
    # Draw a chart for each predictor that was measured
    charts = []
    for name, column, axis in (
        ("zero-shot", "zero_shot_delta_percent", change_axis),
        ("coverage", "coverage_percent", coverage_axis),
    ):
        if retrained[column].notna().any():
            charts.append(
                Chart(
                    f"search-retrained-{name}",
                    f"{capitalized(name)} and retrained NLL",
                    axis,
                    nll_axis,
                    _by_sampler(retrained, column),
                    note="Bars: one standard error.",
                )
            )
    return Panels("search-retrained", tuple(charts))


def front_chart(rows: pd.DataFrame, cost: str) -> Chart:
    """Return zero-shot ΔNLL against cost: every layout, each sampler's front as a line, baselines by name."""
    value = rows["zero_shot_delta_percent"]
    highest_cost = float(rows["cost"].max())
    # Dots and front of each sampler
    clouds: list[Mark] = []
    lines: list[Mark] = []
    samplers = _samplers(rows)
    for sampler, (tone, dash) in zip(samplers, SERIES, strict=False):
        trials = rows[rows["sampler"] == sampler].sort_values(["cost", "zero_shot_delta_percent"])
        clouds.append(
            Points(
                numbers(trials["cost"]),
                numbers(trials["zero_shot_delta_percent"]),
                layouts=tuple(str(name) for name in trials["name"]),
                tone=tone,
                size=2.8,
                opacity=0.35,
            )
        )
        costs, losses = _front(trials, highest_cost)
        lines.append(Line(costs, losses, sampler, tone, dash, width=1.8))
    baselines = rows[rows["sampler"] == search_table.BASELINE]
    squares = [] if baselines.empty else [_baseline_points(baselines)]
    return Chart(
        "search-front",
        "NLL against cost",
        chart.round_axis(capitalized(cost), 0.0, highest_cost),
        chart.round_axis(_CHANGE, min(0.0, float(value.min())), float(value.max())),
        (*clouds, *lines, *squares),
        description=f"Lowest zero-shot ΔNLL at each cost, by sampler: {', '.join(samplers)}.",
        note="Lines: the front of each sampler. Dots: all layouts. Squares are baselines.",
        width=440.0,
        height=300.0,
    )


def _samplers(rows: pd.DataFrame) -> list[str]:
    """Return the samplers of a search without the baselines, in the order of the table."""
    return [str(name) for name in rows["sampler"].unique() if name != search_table.BASELINE]


def _baseline_points(rows: pd.DataFrame) -> Points:
    """Return the baselines of a search by cost, with their names."""
    tips = tuple(
        f"{row['name']}\n{row['num_global']:.0f} heads, cost {row['cost']:.4g}\n"
        f"{signed(row['zero_shot_delta_percent'])} %"
        for row in rows.to_dict("records")
    )
    return Points(
        numbers(rows["cost"]),
        numbers(rows["zero_shot_delta_percent"]),
        tips=tips,
        names=_names(rows),
        label="baseline",
        shape="square",
        tone="ink",
        size=4.5,
    )


def _by_sampler(retrained: pd.DataFrame, column: str) -> tuple[Points, ...]:
    """Return a group of points per sampler, each of a shape and a tone, with the baselines named."""
    samplers = _samplers(retrained)
    tones = [tone for tone, _ in SERIES]
    styles = [Style(search_table.BASELINE, "square", "ink")]
    for sampler, shape, tone in zip(samplers, _SHAPES, tones, strict=False):
        styles.append(Style(sampler, shape, tone))
    groups = []
    for style in styles:
        subset = retrained[retrained["sampler"] == style.label].dropna(subset=[column])
        if subset.empty:
            continue
        tips = tuple(
            f"{row['name']}\ncoverage {row['coverage_percent']:.1f} %, zero-shot "
            f"{signed(row['zero_shot_delta_percent'])} %\n"
            f"retrained {change(row['full_delta_percent'], row['full_standard_error'])} %"
            for row in subset.to_dict("records")
        )
        names = _names(subset) if style.label == search_table.BASELINE else ()
        columns = (column, "full_delta_percent", "full_standard_error")
        groups.append(points(subset, columns, style, tips=tips, names=names))
    return tuple(groups)


def _names(rows: pd.DataFrame) -> tuple[str, ...]:
    return tuple(short(str(name), 22) for name in rows["name"])


def _front(trials: pd.DataFrame, end: float) -> tuple[chart.Numbers, chart.Numbers]:
    """Return the lowest ΔNLL at each cost, as steps up to the cost ``end``."""
    ordered = trials.sort_values(["cost", "zero_shot_delta_percent"])
    lowest = ordered["zero_shot_delta_percent"].cummin()
    is_lower = lowest != lowest.shift()
    # Each step ends at the cost of the next one
    costs = np.repeat(ordered.loc[is_lower, "cost"], 2)[1:]
    losses = np.repeat(lowest[is_lower], 2)
    return (*numbers(costs), end), numbers(losses)


def save_figure(folder: Path, drawn: Chart | Panels) -> Path | None:
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
