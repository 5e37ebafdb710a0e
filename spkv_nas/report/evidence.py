"""Collect the measured changes of NLL of layouts, by evaluation mode: zero-shot, and each retraining."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.comparison import DENSE, FULL_ATTENTION, counted_from
from spkv_nas.artifacts.search_table import FIDELITIES, whole_scores
from spkv_nas.report.inputs import ReportInputs, is_layout

Mask = NDArray[np.bool_]
COMPARISON, SEARCH = "comparison", "search"
_UNTRAINED = "not retrained"
_HELD_OUT = ", on held-out documents not used for selection"


@dataclass(frozen=True, eq=False)
class Result:
    """The measured change of NLL of one layout.

    Attributes:
        name: of the layout.
        delta: NLL relative to the baseline of its ``Evidence``, in percent; NaN: unknown.
        error: standard error of ``delta``, in percentage points; NaN: unknown.
        num_global: number of global KV heads; NaN: unknown.
        mask: bool [L, Hkv], the global heads; None if only the layout's name is known.
        nll: nats per token; NaN: unknown.
    """

    name: str
    delta: float
    error: float = math.nan
    num_global: float = math.nan
    mask: Mask | None = None
    nll: float = math.nan

    @property
    def key(self) -> object:
        """Return what identifies the layout: its heads, so that two names of the same heads are one layout."""
        return self.name if self.mask is None else self.mask.tobytes()


@dataclass(frozen=True, eq=False)
class Evidence:
    """All results of one evaluation mode.

    Attributes:
        description: the mode in words.
        steps: of retraining; NaN: unknown.
        source: ``COMPARISON`` or ``SEARCH``.
        baseline: the row that changes count from, ``DENSE`` or ``FULL_ATTENTION`` (the control).
        results: distinct layouts, lowest NLL first.
        fidelity: for a search, one of ``FIDELITIES``; "" for a comparison.
    """

    description: str
    steps: float
    source: str
    baseline: str
    results: tuple[Result, ...]
    fidelity: str = ""

    @property
    def of_one_budget(self) -> tuple[Result, ...]:
        """Return the results of one budget: the one that most layouts share."""
        budgets = pd.Series([result.num_global for result in self.results]).dropna()
        if budgets.empty:
            return self.results
        return tuple(result for result in self.results if result.num_global == budgets.mode().max())


def all_evidence(inputs: ReportInputs) -> list[Evidence]:
    """Return the evidence of every mode that has results, most retraining first; each has a unique description."""
    collected = [*_search_evidence(inputs), *_comparison_evidence(inputs)]
    occurrences = Counter(evidence.description for evidence in collected)
    collected = [
        replace(evidence, description=f"{evidence.description}, in the {evidence.source}")
        if occurrences[evidence.description] > 1
        else evidence
        for evidence in collected
    ]
    return sorted(collected, key=lambda evidence: -math.inf if math.isnan(evidence.steps) else -evidence.steps)


def stopped_trials(inputs: ReportInputs) -> list[Result]:
    """Return the layouts whose scoring was stopped early; their change of NLL is an estimate.

    Only for a search with a cost, whose chart shows them.
    """
    search = inputs.search
    if search is None or search["cost"].isna().any():
        return []
    rows = search.drop(whole_scores(search).index)
    return list(_search_results(inputs, rows, "zero_shot_delta_percent", None))


def _search_evidence(inputs: ReportInputs) -> Iterator[Evidence]:
    """Yield the evidence of each fidelity of a search, full retraining first."""
    if inputs.search is None:
        return
    recorded = inputs.search_record.get("steps") or {}
    rows = whole_scores(inputs.search)
    for fidelity in reversed(FIDELITIES):
        columns = f"{fidelity}_delta_percent", f"{fidelity}_standard_error"
        results = tuple(_search_results(inputs, rows.dropna(subset=columns[0]), *columns))
        is_zero_shot = fidelity == "zero_shot"
        steps = 0.0 if is_zero_shot else float(recorded.get(fidelity, math.nan))
        description = _mode(steps) + (_HELD_OUT if fidelity == "full" else "")
        # Zero-shot scores count from the dense model, retrained layouts from the control, trained alike
        baseline = DENSE if is_zero_shot else FULL_ATTENTION
        if results:
            yield Evidence(description, steps, SEARCH, baseline, _distinct(results), fidelity)


def _search_results(inputs: ReportInputs, rows: pd.DataFrame, delta: str, error: str | None) -> Iterator[Result]:
    """Yield the rows of a search whose layout has the table's grid."""
    for row in rows.to_dict("records"):
        mask = _mask(row["heads"], inputs.table.grid)
        if mask is not None:
            standard_error = math.nan if error is None else float(row[error])
            yield Result(str(row["name"]), float(row[delta]), standard_error, float(mask.sum()), mask)


def _comparison_evidence(inputs: ReportInputs) -> Iterator[Evidence]:
    """Yield the evidence of each number of steps in the comparison."""
    if inputs.comparison is None:
        return
    baseline = counted_from(inputs.comparison)
    rows = inputs.comparison[is_layout(inputs.comparison) & inputs.comparison["nll"].notna()]
    for steps, group in rows.groupby("steps", dropna=False):
        results = tuple(_comparison_result(inputs, row) for row in group.to_dict("records"))
        yield Evidence(_mode(float(steps)), float(steps), COMPARISON, baseline, _distinct(results))


def _comparison_result(inputs: ReportInputs, row: dict[Any, Any]) -> Result:
    """Return a row of the comparison with the heads of the layout of that name, if there is one."""
    layout = inputs.layouts.get(row["strategy"])
    if layout is not None and row["num_global"] >= 0 and row["num_global"] != layout.num_global:
        layout = None  # its file has been replaced by a layout of another budget
    return Result(
        row["strategy"],
        row["delta_nll_percent"],
        row["delta_nll_standard_error"],
        row["num_global"] if layout is None else float(layout.num_global),
        None if layout is None else layout.global_mask,
        row["nll"],
    )


def _distinct(results: tuple[Result, ...]) -> tuple[Result, ...]:
    """Sort results by change of NLL (by NLL if one is missing) and keep the first of each layout."""
    has_deltas = not any(math.isnan(result.delta) for result in results)
    ordered = sorted(results, key=lambda result: result.delta if has_deltas else result.nll)
    distinct: dict[object, Result] = {}
    for result in ordered:
        distinct.setdefault(result.key, result)
    return tuple(distinct.values())


def _mode(steps: float) -> str:
    """Return the evaluation mode in words."""
    if steps == 0:
        return _UNTRAINED
    return "retrained" if math.isnan(steps) else f"retrained for {steps:.0f} steps"


def _mask(heads: str, grid: tuple[int, ...]) -> Mask | None:
    """Return the global heads in a row of a search's table, bool [L, Hkv]; None for another grid."""
    rows = str(heads).split()
    if {len(row) for row in rows} != {grid[1]} or len(rows) != grid[0]:
        return None
    return np.array([[letter == "G" for letter in row] for row in rows])
