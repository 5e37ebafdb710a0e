"""Draw the change of NLL against coverage and density: by layout, by threshold, by pruning rule."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.comparison import DENSE, FULL_ATTENTION, SP_KV, counted_from
from spkv_nas.artifacts.score_kind import DENSITY
from spkv_nas.report.axes import percent_axis, round_axis
from spkv_nas.report.chart import Chart, Line, Points, Shape, Tone, numbers
from spkv_nas.report.formatting import DELTA_AXES, change, short, signed

SHAPES: dict[str, tuple[Shape, Tone, str]] = {
    SP_KV: ("diamond", "ink", "SP-KV"),
    FULL_ATTENTION: ("square", "ink", "control"),
    DENSE: ("triangle", "ink", "dense model as it is"),
}
LAYOUT: tuple[Shape, Tone, str] = ("circle", "accent", "layout")
NOTE = "Lower is better. Bars: one standard error."


def coverage_nll_chart(comparison: pd.DataFrame, noun: str = DENSITY.noun) -> Chart | None:
    """Return coverage against NLL increase with one standard error; None if no row has both.

    Args:
        comparison: table of ``spkv_nas.artifacts.comparison``.
        noun: quantity that coverage sums.
    """
    rows = comparison.dropna(subset=["coverage_percent", "delta_nll_percent"])
    if rows.empty:
        return None
    # A group of points per kind of row
    marks = []
    for shape, tone, label in (LAYOUT, *SHAPES.values()):
        group = rows[[SHAPES.get(strategy, LAYOUT)[2] == label for strategy in rows["strategy"]]]
        if group.empty:
            continue
        marks.append(
            Points(
                numbers(group["coverage_percent"]),
                numbers(group["delta_nll_percent"]),
                numbers(group["delta_nll_standard_error"]),
                tuple(_tip(row, counted_from(comparison)) for _, row in group.iterrows()),
                tuple(short(name, 22) for name in group["strategy"]),
                label=label,
                shape=shape,
                tone=tone,
            )
        )
    # Range of the vertical axis, and description
    errors = rows["delta_nll_standard_error"].fillna(0.0)
    low, high = (rows["delta_nll_percent"] - errors).min(), (rows["delta_nll_percent"] + errors).max()
    descriptions = (
        f"{short(row['strategy'], 40)} {row['coverage_percent']:.1f} %, {signed(row['delta_nll_percent'])} %"
        for _, row in rows.iterrows()
    )
    return Chart(
        "coverage-nll",
        "Does coverage predict the NLL?",
        "Coverage and NLL increase: " + "; ".join(descriptions) + ".",
        percent_axis(f"Coverage, % of all heads' {noun}"),
        round_axis(DELTA_AXES[counted_from(comparison)], min(low, 0.0), max(high, 0.0), padded=True),
        tuple(marks),
        note=NOTE,
    )


def tau_sweep_chart(rows: pd.DataFrame) -> Chart:
    """Return density against the change of NLL from open gates as tau moves, with one standard error.

    SP-KV paper, figure "Relationship between NLL and KV cache density".

    Args:
        rows: table of ``spkv_nas.evaluation.sweep``, columns tau, density, delta_nll_percent,
            delta_nll_standard_error.
    """
    density, change = 100 * rows["density"], rows["delta_nll_percent"]
    error = rows["delta_nll_standard_error"]
    names = [f"τ {round(tau, 2 if 0.1 <= tau <= 0.9 else 3):g}" if tau else "open" for tau in rows["tau"]]
    marks: list[Line | Points] = [Line(numbers(density), numbers(change), width=1.5, opacity=0.6)]
    # Points: thresholds, and open gates
    is_gated = (rows["tau"] > 0).to_numpy()
    groups: tuple[tuple[NDArray[np.bool_], str, Shape, Tone], ...] = (
        (is_gated, "threshold τ", "circle", "accent"),
        (~is_gated, "open gates", "square", "ink"),
    )
    for selected, label, shape, tone in groups:
        if selected.any():
            labels = tuple(name for name, is_selected in zip(names, selected, strict=True) if is_selected)
            marks.append(
                Points(
                    numbers(density[selected]),
                    numbers(change[selected]),
                    numbers(error[selected]),
                    names=labels,
                    farthest=1,
                    optional=True,
                    label=label,
                    shape=shape,
                    tone=tone,
                    size=4.0,
                )
            )
    # Range of the vertical axis
    error_bars = error.fillna(0.0)
    low, high = min(0.0, float((change - error_bars).min())), max(0.0, float((change + error_bars).max()))
    return Chart(
        "tau-sweep",
        "NLL against density",
        "Density and NLL change: "
        + "; ".join(f"{name} {a:.1f} %, {signed(b)} %" for name, a, b in zip(names, density, change, strict=True))
        + ".",
        percent_axis("Density, % of keys kept (mean over heads)"),
        round_axis("NLL change from open gates, %", low, high, padded=True),
        tuple(marks),
        note="Bars: one standard error.",
    )


def baselines_chart(rows: pd.DataFrame) -> Chart:
    """Return density against the change of NLL from the dense model: pruning rules, and SP-KV as tau moves.

    Args:
        rows: table of ``artifacts.result_tables.BASELINES``, the dense model first.
    """
    # Line of SP-KV through its thresholds
    rows = rows[rows["method"] != FULL_ATTENTION]
    is_spkv = rows["method"] == SP_KV
    with_sinks = ~is_spkv & (rows["sinks"] > 0)
    marks: list[Line | Points] = []
    spkv = rows[is_spkv & (rows["tau"] > 0)].sort_values("density")
    if len(spkv) > 1:
        marks.append(Line(_percent(spkv), numbers(spkv["delta_nll_percent"]), width=1.5, opacity=0.6, tone="ink"))
    # Points: rules with and without sinks, and SP-KV
    groups: tuple[tuple[pd.DataFrame, str, Shape, Tone, bool], ...] = (
        (rows[~is_spkv & ~with_sinks], "compressed, without sinks", "circle", "accent", True),
        (rows[with_sinks], "compressed, with sinks", "circle", "accent", False),
        (spkv, "SP-KV", "diamond", "ink", False),
    )
    for group, label, shape, tone, hollow in groups:
        if not group.empty:
            names = tuple(f"τ {row.tau:g}" if row.method == SP_KV else row.method for row in group.itertuples())
            tips = tuple(_rule_tip(name, row) for name, (_, row) in zip(names, group.iterrows(), strict=True))
            if hollow and with_sinks.any():
                names = ()  # the dots with sinks lie beside them and have names
            marks.append(
                Points(
                    _percent(group),
                    numbers(group["delta_nll_percent"]),
                    numbers(group["delta_nll_standard_error"]),
                    tips,
                    names=names,
                    farthest=2,
                    optional=True,
                    label=label,
                    shape=shape,
                    tone=tone,
                    hollow=hollow,
                    size=4.0,
                )
            )
    # Range of the vertical axis, and description
    dots = pd.concat([part for part, *_ in groups])
    error_bars = dots["delta_nll_standard_error"].fillna(0.0)
    low, high = ((dots["delta_nll_percent"] + sign * error_bars) for sign in (-1.0, 1.0))
    texts = (f"{row.method} {100 * row.density:.1f} %, {signed(row.delta_nll_percent)} %" for row in dots.itertuples())
    return Chart(
        "baselines",
        "NLL against density, by compression rule",
        "Density and NLL change: " + "; ".join(texts) + ".",
        round_axis("Density, % of keys outside the window", 0.0, 100 * dots["density"].max(), padded=True),
        round_axis("NLL change from the dense model, %", min(0.0, low.min()), max(0.0, high.max()), padded=True),
        tuple(marks),
        note="Lower is better. Bars: one standard error.",
        width=520.0,
        height=360.0,
    )


def _percent(rows: pd.DataFrame) -> tuple[float, ...]:
    """Return densities in percent."""
    return numbers(rows["density"], 100.0)


def _rule_tip(name: str, row: pd.Series) -> str:
    """Return the tooltip of a pruning rule."""
    delta = change(row["delta_nll_percent"], row["delta_nll_standard_error"])
    return f"{name}, {row['sinks']:g} sinks\ndensity {100 * row['density']:.1f} %\n{delta} %"


def _tip(row: pd.Series, baseline: str) -> str:
    """Return the tooltip of a row of the comparison."""
    if row["strategy"] == baseline:
        return f"{baseline}\nthe reference, at 0"
    delta = change(row["delta_nll_percent"], row["delta_nll_standard_error"])
    return f"{row['strategy']}\ncoverage {row['coverage_percent']:.1f} %\n{delta} %"
