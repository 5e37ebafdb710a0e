"""Write the sentences of the comparison and search sections; ``verdict`` writes the conclusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spkv_nas.evaluation.ranking import MIN_ITEMS
from spkv_nas.evaluation.searched import correlations
from spkv_nas.report.evidence import all_evidence
from spkv_nas.report.formatting import signed
from spkv_nas.report.inputs import ReportInputs


def findings(record: Mapping[str, Any]) -> list[str]:
    """Return the rank correlations that ``comparison.yaml`` records, in a sentence.

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
        return text if p_value is None else f"{text} (p {f'= {p_value:.2g}' if p_value else '< 0.0001'})"
    low, high = (signed(bound, 2) for bound in interval)
    return f"{text} (95 % interval {low} to {high})"


def search_findings(inputs: ReportInputs) -> list[str]:
    """Return how well cheap scores rank the layouts of a search.

    Nothing where the retrained layouts were measured on too few documents to rank them.
    """
    rows = inputs.search
    if rows is None or not all(each.is_rankable for each in all_evidence(inputs) if each.fidelity == "full"):
        return []
    return [
        f"Rank correlation of {pair} over {correlation['layouts']} layouts: {_with_uncertainty(correlation)}."
        for pair, correlation in correlations(rows).items()
        if correlation is not None
    ]
