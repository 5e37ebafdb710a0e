"""The report's sentences, all derived from its inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any, TypeGuard

import numpy as np
import pandas as pd

from spkv_nas.artifacts.comparison import SP_KV
from spkv_nas.artifacts.density import DensityTable
from spkv_nas.evaluation.guidance import correlations, guidance
from spkv_nas.report.inputs import Inputs, contenders, widest_layout
from spkv_nas.report.words import change, signed, versus_full


def findings(inputs: Inputs) -> list[str]:
    """The report's sentences, the result first."""
    if inputs.comparison is not None:
        layouts = contenders(inputs.comparison)
        if not layouts.empty:
            return [
                *_result(layouts, inputs.table),
                *_ranking(layouts, inputs.table),
                *_correlation(inputs.record),
                *_reference(inputs.comparison),
            ]
    return _before_training(inputs)


def _result(layouts: pd.DataFrame, table: DensityTable) -> list[str]:
    best = layouts.iloc[0]
    budget = (
        f" with {best['num_global']:.0f} of {table.num_heads} KV heads global"
        if not math.isnan(best["num_global"])
        else ""
    )
    rivals = f"has the lowest NLL of {len(layouts)} layouts" if len(layouts) > 1 else "is the only layout trained"
    delta = f", {versus_full(best)}" if not math.isnan(best["delta_nll_percent"]) else ""
    sentences = [f"{best['strategy']} {rivals}{budget}: {best['nll']:.4f} nats per token{delta}."]
    if len(layouts) == 1 or math.isnan(best["delta_nll_percent"]):
        return sentences
    second = layouts.iloc[1]
    lead = second["delta_nll_percent"] - best["delta_nll_percent"]
    if math.isnan(lead):
        return sentences
    error = _combined_error(best, second)
    ahead = f"The next, {second['strategy']}, is {lead:.3f} percentage points behind"
    if math.isnan(error):
        return [*sentences, f"{ahead}; no standard error is known, so the order of these two is open."]
    verdict = "more than" if lead > 2 * error else "too close to call at less than"
    noise = f"{verdict} two combined standard errors (one is {error:.3f})"
    return [*sentences, f"{ahead}, {noise}; the spread between training runs is not in these errors."]


def _ranking(layouts: pd.DataFrame, table: DensityTable) -> list[str]:
    known = layouts.dropna(subset=["coverage_percent"])
    pairs = [
        (one, other)
        for one, other in combinations([row for _, row in known.iterrows()], 2)
        if one["coverage_percent"] != other["coverage_percent"] and one["nll"] != other["nll"]
    ]
    if not pairs:
        return []
    right = [pair for pair in pairs if _agrees(*pair)]
    clear = [pair for pair in pairs if _is_clear(*pair)]
    clear_right = sum(_agrees(*pair) for pair in clear)
    widest = known.sort_values("coverage_percent", ascending=False, kind="stable").iloc[0]
    best = known.iloc[0]
    highest = f"highest {table.measure.noun} coverage, {widest['coverage_percent']:.1f} %"
    top = (
        f"It also has the {highest}"
        if best.name == widest.name == layouts.iloc[0].name
        else f"The {highest}, is that of {widest['strategy']}"
    )
    ranks = f"coverage puts {len(right)} of {len(pairs)} pairs of layouts in the order of their NLL"
    share = f"all {len(clear)}" if clear_right == len(clear) else f"{clear_right} of the {len(clear)}"
    if clear:
        noise = f", and {share} that are more than two combined standard errors apart"
    elif all(math.isnan(_combined_error(*pair)) for pair in pairs):
        noise = ", of which no standard error is known"
    else:
        noise = ", but no pair is more than two combined standard errors apart"
    return [f"{top}; {ranks}{noise}."]


def _correlation(record: Mapping[str, Any]) -> list[str]:
    """The rank correlations recorded in ``comparison.yaml``: keys rho and, where known, layouts and interval."""
    recorded = record.get("rank_correlation")
    if not _is_correlation(recorded):
        return []
    over = f" over {recorded['layouts']} layouts" if "layouts" in recorded else ""
    sentence = f"Spearman's rank correlation of coverage and NLL increase{over} is {_with_interval(recorded)}"
    zero_shot = record.get("zero_shot_rank_correlation")
    if _is_correlation(zero_shot):
        sentence += f", that of the NLL increase before any training {_with_interval(zero_shot)}"
        return [f"{sentence}; {signed(-1, 0)} and {signed(1, 0)} would be perfect rankings."]
    return [f"{sentence}; {signed(-1, 0)} would be a perfect ranking."]


def _is_correlation(recorded: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(recorded, Mapping) and isinstance(recorded.get("rho"), int | float)


def _with_interval(recorded: Mapping[str, Any]) -> str:
    text, interval = signed(recorded["rho"], 2), recorded.get("interval")
    if not isinstance(interval, list | tuple) or len(interval) != 2:
        return text
    low, high = (signed(float(bound), 2) for bound in interval)
    return f"{text} (95 % interval {low} to {high})"


def _reference(comparison: pd.DataFrame) -> list[str]:
    rows = comparison[(comparison["strategy"] == SP_KV) & comparison["delta_nll_percent"].notna()]
    if rows.empty:
        return []
    row = rows.iloc[0]
    density = f" keeps {row['density_percent']:.1f} % of the tokens and" if row["density_percent"] >= 0 else ""
    return [f"SP-KV itself, which can open any head for any token,{density} is {versus_full(row)}."]


def _before_training(inputs: Inputs) -> list[str]:
    table = inputs.table
    best = widest_layout(inputs)
    if best is None:
        return [_mean(table)]
    layout = inputs.layouts[best]
    rivals = sum(other.num_global == layout.num_global for other in inputs.layouts.values())
    which = f"Of {rivals} layouts" if rivals > 1 else "Of the layouts"
    return [
        f"{which} with {layout.num_global} of {table.num_heads} KV heads global, {best} has the highest "
        f"{table.measure.noun} coverage: {100 * inputs.covered[best]:.1f} %.",
        "None has been trained yet, so which has the lowest NLL is open.",
    ]


def _mean(table: DensityTable) -> str:
    if table.is_density:
        return f"On average, the {table.num_heads} KV heads keep {100 * table.mean:.1f} % of the tokens."
    measure, highest = table.measure, tuple(np.argwhere(table.values == table.values.max())[0])
    return (
        f"The highest {measure.noun} of the {table.num_heads} KV heads is that of layer {highest[0]}, "
        f"KV head {highest[1]}: {measure.exact(table.values.max())} {measure.unit}."
    )


def _combined_error(one: pd.Series[Any], other: pd.Series[Any]) -> float:
    """Standard error of the difference of two deltas, taken as independent (an upper bound where they share noise)."""
    return math.hypot(one["delta_nll_standard_error"], other["delta_nll_standard_error"])


def _agrees(one: pd.Series[Any], other: pd.Series[Any]) -> bool:
    return bool((one["coverage_percent"] > other["coverage_percent"]) == (one["nll"] < other["nll"]))


def _is_clear(one: pd.Series[Any], other: pd.Series[Any]) -> bool:
    difference = abs(one["delta_nll_percent"] - other["delta_nll_percent"])
    return bool(difference > 2 * _combined_error(one, other))


def search_findings(rows: pd.DataFrame) -> list[str]:
    """What each sampler of a search reached, and how well cheap scores order its layouts."""
    said = []
    for sampler, reached in guidance(rows).items():
        if (best := reached.retrained) is not None:
            said.append(
                f"{sampler}: retrained in full, the best of the short retraining, {best.layout}: "
                f"{change(best.delta_nll_percent, best.standard_error)} %."
            )
    for pair, correlation in correlations(rows).items():
        if correlation is not None:
            low, high = correlation["interval"]
            said.append(
                f"Rank correlation of {pair} over {correlation['layouts']} layouts: {signed(correlation['rho'], 2)} "
                f"(95 % interval {signed(low, 2)} to {signed(high, 2)})."
            )
    return said
