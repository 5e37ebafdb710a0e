"""Draw coverage against the budget of global KV heads, and how far probes agree on which heads to take."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.proposal.agreement import short_labels
from spkv_nas.proposal.stability import Certainty
from spkv_nas.report.axes import name_axis, round_axis
from spkv_nas.report.chart import SERIES, Axis, Band, Chart, Heatmap, Line, Mark, Panels, Points, Rule, numbers, thinned
from spkv_nas.report.formatting import short
from spkv_nas.report.profiles import coverage_by_budget

_BUDGET = "Budget, global KV heads"
_UNSEEN = 0.1  # of 100 percent: a quarter of a line's width


def coverage_budget_chart(
    table: HeadScores, layouts: Mapping[str, Layout], covered: Mapping[str, float], certainty: Certainty | None
) -> Chart | None:
    """Coverage against the budget by strategy, and where the layouts are; None where no head keeps anything.

    Args:
        covered: each layout's density coverage, in [0, 1].
        certainty: of the densest heads' curve; None where no interval is known.
    """
    curve = coverage_by_budget(table)
    if curve is None:
        return None
    marks: list[Mark] = []
    note = "Lines: the best possible, the expected random, and the layer patterns, at every budget."
    if certainty is not None:
        reach = f"95 % interval, up to ± {certainty.reach:.1f}"
        budget, low, high = (numbers(certainty.curve[name]) for name in ("budget", "low", "high"))
        marks += [Band(budget, numbers(low, 100), numbers(high, 100), reach, opacity=0.3),
                  Rule(certainty.knee, f"knee {certainty.knee}")]  # fmt: skip
    names = [str(name) for name in curve.columns if name != "budget"]
    for name, (tone, dash) in zip(names, SERIES, strict=False):
        known = curve[["budget", name]].dropna()
        line = thinned(numbers(known["budget"]), numbers(known[name], 100), _UNSEEN)
        marks.append(Line(*line, name, tone, dash))
    if layouts:
        heads = numbers(layout.num_global for layout in layouts.values())
        percent = numbers((covered[name] for name in layouts), 100)
        tips = tuple(
            f"{name}\n{layout.num_global} heads, coverage {100 * covered[name]:.1f} %"
            for name, layout in layouts.items()
        )
        marks.append(Points(heads, percent, tips=tips, tone="ink", label="layout"))
        note += " Dots: the layouts of this report."
    if certainty is not None:
        note += f" Band: {reach} points, over documents. Knee: beyond it each further head adds less than average."
    covers = f"{table.measure.title} coverage"
    third = curve.iloc[max(0, round(len(curve) / 3) - 1)]
    shares = ", ".join(f"{name} {100 * third[name]:.1f} %" for name in names if not math.isnan(third[name]))
    return Chart(
        "coverage-budget",
        "Coverage vs budget",
        f"{covers} with {third['budget']:.0f} of {table.num_heads} heads global: {shares}. Dots are the layouts.",
        round_axis(_BUDGET, 0, table.num_heads, exact=True),
        round_axis(f"{covers}, %", 0, 100),
        tuple(marks),
        note=note,
    )


def budgets_chart(rows: pd.DataFrame, knee: int, *, num_domains: int) -> Chart:
    """Coverage of the best layout at every budget, with 95 % band, knee, and memory above where it is known.

    Args:
        rows: of ``spkv_nas.proposal.requirements.budget_table``.
        knee: of ``spkv_nas.proposal.requirements.knee_row``; not drawn outside the range.
    """
    budget, coverage = numbers(rows["budget"]), numbers(rows["coverage"], 100)
    marks: list[Mark] = []
    if rows["coverage_low"].notna().all():
        low, high = numbers(rows["coverage_low"], 100), numbers(rows["coverage_high"], 100)
        reach = max(np.subtract(high, low)) / 2
        marks.append(Band(budget, low, high, f"95 % interval, up to ± {reach:.1f}", opacity=0.35))
    if budget[0] <= knee <= budget[-1]:
        marks.append(Rule(knee, f"knee {knee}"))
    marks.append(Line(budget, coverage, "best"))
    if len(rows) < 30:
        marks.append(Points(budget, coverage, size=3.0))
    if num_domains > 1:
        marks.append(Line(budget, numbers(rows["worst_domain"], 100), "its worst domain", "ink", "dotted"))
    marks.append(Line(budget, numbers(rows["random"], 100), "random heads, expected", "muted", "dashed"))
    room = 0.03 * (budget[-1] - budget[0]) or 1.0
    across = round_axis(_BUDGET, budget[0] - room, budget[-1] + room, exact=True)
    return Chart(
        "budgets",
        "Coverage vs budget",
        f"Coverage rises from {coverage[0]:.1f} % with {budget[0]:.0f} heads to {coverage[-1]:.1f} % with "
        f"{budget[-1]:.0f}.",
        across,
        round_axis("Coverage, %", 0, 100),
        tuple(marks),
        above=_memory_axis(rows, across),
    )


def agreement_charts(rows: pd.DataFrame) -> Panels:
    """Jaccard index of the chosen heads and rank correlation of the densities, each as a matrix of all pairs.

    Args:
        rows: of ``spkv_nas.proposal.agreement.agreement``.
    """
    labels = short_labels(rows)
    shown = [short(label, 24) for label in labels.values()]
    first = rows.iloc[0]
    headings = {
        "jaccard": f"{first['budget']:.0f} densest heads: Jaccard, % (chance {100 * first['chance']:.0f})",
        "spearman": "densities: Spearman, %",
    }
    axes = name_axis("", shown), name_axis("", shown, down=True)
    charts = tuple(
        Chart(f"agreement-{column}", "Agreement of probes", heading, *axes, (Heatmap(_matrix(rows, column, labels)),),
              heading=heading)
        for column, heading in headings.items()
    )  # fmt: skip
    return Panels("agreement", charts)


def _matrix(rows: pd.DataFrame, column: str, labels: Mapping[str, str]) -> tuple[tuple[float, ...], ...]:
    names = list(labels)
    values: NDArray[np.float64] = np.eye(len(names))
    for one, other, value in zip(rows["first"], rows["second"], rows[column], strict=True):
        i, k = names.index(one), names.index(other)
        values[i, k] = values[k, i] = value
    return tuple(tuple(row) for row in values.tolist())


def _memory_axis(rows: pd.DataFrame, across: Axis) -> Axis | None:
    """GiB of keys and values in place of heads, which they are linear in; None where not known."""
    budget = rows["budget"].to_numpy()
    if not rows["kv_bytes"].notna().all() or len(rows) < 2 or not (rows["num_global"] == budget).all():
        return None
    slope, start = np.polyfit(budget, rows["kv_bytes"] / 2**30, 1)
    memory = round_axis("Keys and values, GiB", start + slope * across.low, start + slope * across.high, exact=True)
    ticks = tuple(((value - start) / slope, text) for value, text in memory.ticks)
    return Axis(memory.title, across.low, across.high, ticks)
