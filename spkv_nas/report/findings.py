"""Write the sentences of the comparison and search sections; ``verdict`` writes the conclusion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pandas as pd

from spkv_nas.artifacts.comparison import DENSE, FULL_ATTENTION, SP_KV, counted_from
from spkv_nas.evaluation.guidance import correlations, guidance
from spkv_nas.evaluation.ranking import MIN_ITEMS
from spkv_nas.report.evidence import COMPARISON, all_evidence
from spkv_nas.report.formatting import BASELINES, change, signed, standard_errors, versus
from spkv_nas.report.inputs import ReportInputs

_Pair = tuple["pd.Series[Any]", "pd.Series[Any]"]


def findings(inputs: ReportInputs) -> list[str]:
    """Return the sentences on the comparison; none before training."""
    if inputs.comparison is None:
        return []
    return [
        *_baseline(inputs.comparison),
        *_ranking(inputs),
        *_correlation(inputs.record),
        *_reference(inputs.comparison),
    ]


def _baseline(comparison: pd.DataFrame) -> list[str]:
    """Return what changes of NLL are against, and the effect of retraining alone."""
    if counted_from(comparison) != DENSE:
        if not (comparison["strategy"] == FULL_ATTENTION).any():
            return []
        return [
            "Changes of NLL are against the control, full attention retrained like the layouts; this comparison has no "
            "row for the dense model as it is."
        ]
    control = comparison[(comparison["strategy"] == FULL_ATTENTION) & comparison["delta_nll_percent"].notna()]
    rows = control.head(1).iterrows()
    return [f"The control, full attention retrained like the layouts, is {versus(row, DENSE)}." for _, row in rows]


def _ranking(inputs: ReportInputs) -> list[str]:
    """Return how well coverage ranks the layouts of one budget; nothing if no two differ in coverage and NLL."""
    contenders = _contenders(inputs)
    pairs = [
        (first, second)
        for first, second in combinations([row for _, row in contenders.iterrows()], 2)
        if first["coverage_percent"] != second["coverage_percent"] and first["nll"] != second["nll"]
    ]
    if not pairs:
        return []
    widest = contenders.sort_values("coverage_percent", ascending=False, kind="stable").iloc[0]
    return [
        f"{widest['strategy']} has the highest {inputs.table.measure.noun} coverage, "
        f"{widest['coverage_percent']:.1f} %; coverage puts {sum(_agrees(*pair) for pair in pairs)} of {len(pairs)} "
        f"pairs of layouts in the order of their NLL, {_significant_pairs(pairs, inputs)}."
    ]


def _contenders(inputs: ReportInputs) -> pd.DataFrame:
    """Return the comparison's rows of layouts of one budget that have a coverage."""
    compared = [evidence for evidence in all_evidence(inputs) if evidence.source == COMPARISON]
    if inputs.comparison is None or not compared:
        return pd.DataFrame(columns=["coverage_percent"])
    names = [result.name for result in compared[0].of_one_budget]
    return inputs.comparison[inputs.comparison["strategy"].isin(names)].dropna(subset=["coverage_percent"])


def _significant_pairs(pairs: list[_Pair], inputs: ReportInputs) -> str:
    """Return how many of the significantly different pairs coverage ranks like NLL."""
    errors = [inputs.pair_error(first["strategy"], second["strategy"]) for first, second in pairs]
    if all(math.isnan(error) for error in errors):
        return "of which no standard error of the difference is known"
    clear = [pair for pair, error in zip(pairs, errors, strict=True) if _difference(*pair) > inputs.critical * error]
    if not clear:
        return "but no pair is significantly different"
    right = sum(_agrees(*pair) for pair in clear)
    share = f"all {len(clear)}" if right == len(clear) else f"{right} of the {len(clear)}"
    return (
        f"and {share} that are significantly different (more than {standard_errors(inputs.critical)} of the difference)"
    )


def _difference(first: pd.Series[Any], second: pd.Series[Any]) -> float:
    """Return the absolute difference of two changes of NLL, in percentage points."""
    return abs(float(first["delta_nll_percent"] - second["delta_nll_percent"]))


def _agrees(first: pd.Series[Any], second: pd.Series[Any]) -> bool:
    """Return True if the layout of higher coverage has the lower NLL."""
    return bool((first["coverage_percent"] > second["coverage_percent"]) == (first["nll"] < second["nll"]))


def _correlation(record: Mapping[str, Any]) -> list[str]:
    """Return the rank correlations that ``comparison.yaml`` records.

    Their keys are rho and, where known, layouts and interval.
    """
    recorded, zero_shot = record.get("rank_correlation"), record.get("zero_shot_rank_correlation")
    if recorded is None:
        return []
    over = f" over {recorded['layouts']} layouts" if "layouts" in recorded else ""
    sentence = f"Spearman's rank correlation of coverage and NLL increase{over} is {_with_uncertainty(recorded)}"
    if zero_shot is not None:
        sentence += f", that of the NLL increase before any training {_with_uncertainty(zero_shot)}"
        return [f"{sentence}; {signed(-1, 0)} and {signed(1, 0)} would be perfect rankings."]
    return [f"{sentence}; {signed(-1, 0)} would be a perfect ranking."]


def _with_uncertainty(recorded: Mapping[str, Any]) -> str:
    """Return a rank correlation with its interval or, below ``MIN_ITEMS`` layouts, its p-value, if recorded."""
    text, interval, p_value = signed(recorded["rho"], 2), recorded.get("interval"), recorded.get("p_value")
    if recorded.get("layouts", MIN_ITEMS) < MIN_ITEMS or interval is None:
        return text if p_value is None else f"{text} (p = {p_value:.2g})"
    low, high = (signed(bound, 2) for bound in interval)
    return f"{text} (95 % interval {low} to {high})"


def _reference(comparison: pd.DataFrame) -> list[str]:
    """Return where SP-KV itself stands."""
    rows = comparison[(comparison["strategy"] == SP_KV) & comparison["delta_nll_percent"].notna()]
    if rows.empty:
        return []
    row = rows.iloc[0]
    density = f" keeps {row['density_percent']:.1f} % of the tokens and" if row["density_percent"] >= 0 else ""
    subject = f"SP-KV itself, which decides for every token and head,{density}"
    return [f"{subject} is {versus(row, counted_from(comparison))}."]


def search_findings(rows: pd.DataFrame) -> list[str]:
    """Return what each sampler of a search reached, and how well cheap scores rank its layouts."""
    sentences = []
    for sampler, reached in guidance(rows).items():
        if (best := reached.retrained) is not None:
            value = change(best.delta_nll_percent, best.standard_error)
            sentences.append(
                f"{sampler}: {best.layout}, its best layout after short retraining, has a ΔNLL of {value} % against "
                f"{BASELINES[FULL_ATTENTION]} after full retraining."
            )
    for pair, correlation in correlations(rows).items():
        if correlation is not None:
            sentences.append(
                f"Rank correlation of {pair} over {correlation['layouts']} layouts: {_with_uncertainty(correlation)}."
            )
    return sentences
