"""Draw coverage against the budget of global KV heads, and the agreement of probes on the heads."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.proposal.agreement import short_labels
from spkv_nas.proposal.budget_curve import coverage_by_budget
from spkv_nas.proposal.stability import Certainty
from spkv_nas.report.axes import name_axis, round_axis
from spkv_nas.report.chart import SERIES, Band, Chart, Heatmap, Line, Mark, Panels, Points, Rule, numbers
from spkv_nas.report.formatting import short

_BUDGET = "Budget, global KV heads"
_MAX_VERTICES = 100  # of a line: more are not seen, but are most of the page of a large model


def coverage_budget_chart(
    table: HeadScores, layouts: Mapping[str, Layout], covered: Mapping[str, float], certainty: Certainty | None
) -> Chart | None:
    """Return coverage against budget by strategy, with the layouts as dots; None if no head keeps anything.

    ``covered`` is each layout's coverage, in [0, 1]; ``certainty`` gives the band of the curve of highest scores.
    """
    curve = coverage_by_budget(table)
    if curve is None:
        return None
    marks: list[Mark] = []
    note = "Lines: the best possible, the expected random, and the layer patterns, at every budget."
    # Confidence band and knee
    if certainty is not None:
        interval_label = f"95 % interval, up to ± {certainty.reach:.1f}"
        budget, low, high = (numbers(certainty.curve[name]) for name in ("budget", "low", "high"))
        marks += [
            Band(budget, numbers(low, 100), numbers(high, 100), interval_label, opacity=0.3),
            Rule(certainty.knee, f"knee {certainty.knee}"),
        ]
        band = f"Band: {interval_label} points, over documents."
        note += f" {band} Knee: beyond it each further head adds less than average."
    # A line per strategy
    names = [str(name) for name in curve.columns if name != "budget"]
    for name, (tone, dash) in zip(names, SERIES, strict=False):
        line = curve[["budget", name]].dropna()
        line = line.iloc[np.unique(np.linspace(0, len(line) - 1, _MAX_VERTICES).round().astype(int))]
        marks.append(Line(numbers(line["budget"]), numbers(line[name], 100), name, tone, dash))
    # A dot per layout
    if layouts:
        heads = {name: layout.num_global for name, layout in layouts.items()}
        tips = tuple(f"{name}\n{heads[name]} heads, coverage {100 * covered[name]:.1f} %" for name in layouts)
        dots = numbers(heads.values()), numbers((covered[name] for name in layouts), 100)
        marks.append(Points(*dots, tips=tips, tone="ink", label="layout"))
        note += " Dots: the layouts of this report."
    # Description
    covers = f"{table.measure.title} coverage"
    third = curve.iloc[max(0, round(len(curve) / 3) - 1)]
    shares = ", ".join(f"{name} {100 * third[name]:.1f} %" for name in names if not math.isnan(third[name]))
    return Chart(
        "coverage-budget",
        "Coverage vs budget",
        round_axis(_BUDGET, 0, table.num_heads, exact=True),
        round_axis(f"{covers}, %", 0, 100),
        tuple(marks),
        description=f"{covers} with {third['budget']:.0f} of {table.num_heads} heads global: {shares}.",
        note=note,
    )


def agreement_charts(rows: pd.DataFrame) -> Panels:
    """Return matrices over the pairs of ``proposal.agreement``: Jaccard index of the heads, and rank correlation."""
    # Shorten the probes' names, and title the matrices
    labels = short_labels(rows)
    short_names = [short(label, 24) for label in labels.values()]
    first = rows.iloc[0]
    headings = {
        "jaccard": f"{first['budget']:.0f} highest-scoring heads: Jaccard, % (chance {100 * first['chance']:.0f})",
        "spearman": "scores: Spearman, %",
    }
    # Draw one matrix for each measure
    axes = name_axis("", short_names), name_axis("", short_names, down=True)
    charts = (
        Chart(f"agreement-{column}", heading, *axes, (Heatmap(_matrix(rows, column, labels)),), heading=heading)
        for column, heading in headings.items()
    )
    return Panels("agreement", tuple(charts))


def _matrix(rows: pd.DataFrame, column: str, labels: Mapping[str, str]) -> tuple[tuple[float, ...], ...]:
    """Return a symmetric matrix of one column over all probes, with 1 on the diagonal."""
    names = list(labels)
    values: NDArray[np.float64] = np.eye(len(names))
    for first, second, value in zip(rows["first"], rows["second"], rows[column], strict=True):
        i, k = names.index(first), names.index(second)
        values[i, k] = values[k, i] = value
    return tuple(tuple(row) for row in values.tolist())
