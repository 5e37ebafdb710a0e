"""What was measured of which layout, by every way of measuring on the page: without training, and retrained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.search_table import FIDELITIES, whole_scores
from spkv_nas.report.inputs import Inputs

Mask = NDArray[np.bool_]
_UNTRAINED = "not retrained"
_UNSEEN = ", on documents that nothing chose on"


@dataclass(frozen=True, eq=False)
class Result:
    """A layout, bool [L, Hkv], and how far its NLL lies above full attention's, in percent; the error may be NaN."""

    name: str
    mask: Mask
    delta: float
    error: float

    @property
    def num_global(self) -> int:
        """Number of global KV heads."""
        return int(self.mask.sum())

    def error_against(self, other: Result) -> float:
        """Standard error of the difference, the two taken as independent (an upper bound where they share noise)."""
        return math.hypot(self.error, other.error)


@dataclass(frozen=True, eq=False)
class Evidence:
    """A way of measuring in words, its steps of retraining (NaN: unknown), and the distinct layouts, the best first."""

    how: str
    steps: float
    results: tuple[Result, ...]

    @property
    def of_one_budget(self) -> tuple[Result, ...]:
        """Of several budgets, the results of the one that most layouts share."""
        budget = pd.Series([result.num_global for result in self.results]).mode().max()
        return tuple(result for result in self.results if result.num_global == budget)


def all_evidence(inputs: Inputs) -> list[Evidence]:
    """Every way of measuring that there is, the longest retraining first."""
    found = [*_of_search(inputs), *_of_comparison(inputs)]
    merged: dict[str, Evidence] = {}
    for one in found:  # what the search and the comparison both have, such as layouts that were not retrained
        earlier = merged.get(one.how)
        merged[one.how] = one if earlier is None else _evidence(one.how, one.steps, [*earlier.results, *one.results])
    return sorted(merged.values(), key=lambda one: -math.inf if math.isnan(one.steps) else -one.steps)


def stopped_trials(inputs: Inputs) -> list[Result]:
    """Layouts whose scoring was stopped, where a chart shows what they cost; their change is an estimate."""
    search = inputs.search
    if search is None or search["cost"].isna().any():
        return []
    rows = search.drop(whole_scores(search).index)
    tried = zip(rows["name"], rows["heads"], rows["zero_shot_delta_percent"], strict=True)
    masks = ((name, _mask(heads, inputs.table.grid), delta) for name, heads, delta in tried)
    return [Result(str(name), mask, float(delta), math.nan) for name, mask, delta in masks if mask is not None]


def _of_search(inputs: Inputs) -> Iterator[Evidence]:
    if inputs.search is None:
        return
    steps = inputs.search_record.get("steps")
    rows = whole_scores(inputs.search)
    rows = rows.assign(mask=[_mask(heads, inputs.table.grid) for heads in rows["heads"]])
    rows = rows[rows["mask"].notna()]
    for fidelity in reversed(FIDELITIES):
        measured = rows.dropna(subset=f"{fidelity}_delta_percent")
        columns = (f"{fidelity}_delta_percent", f"{fidelity}_standard_error")
        results = [
            Result(str(name), mask, float(delta), float(error))
            for name, mask, delta, error in zip(
                measured["name"], measured["mask"], *(measured[column] for column in columns), strict=True
            )
        ]
        taken = 0.0 if fidelity == "zero_shot" else _steps(steps.get(fidelity) if isinstance(steps, dict) else None)
        how = _how(taken) + (_UNSEEN if fidelity == "full" else "")
        if results:
            yield _evidence(how, taken, results)


def _of_comparison(inputs: Inputs) -> Iterator[Evidence]:
    if inputs.comparison is None:
        return
    rows = inputs.comparison[inputs.comparison["strategy"].isin(list(inputs.layouts))]
    masks = {name: layout.global_mask for name, layout in inputs.layouts.items()}
    for steps, some in rows.dropna(subset="delta_nll_percent").groupby("steps", dropna=False):
        results = [
            Result(name, masks[name], delta, error)
            for name, delta, error in zip(
                some["strategy"], some["delta_nll_percent"], some["delta_nll_standard_error"], strict=True
            )
        ]
        yield _evidence(_how(float(steps)), float(steps), results)


def _evidence(how: str, steps: float, results: list[Result]) -> Evidence:
    distinct: dict[bytes, Result] = {}
    for result in results:
        distinct.setdefault(result.mask.tobytes(), result)
    return Evidence(how, steps, tuple(sorted(distinct.values(), key=lambda result: result.delta)))


def _steps(said: Any) -> float:
    """NaN where a record does not say them."""
    return float(said) if isinstance(said, int | float) else math.nan


def _how(steps: float) -> str:
    if steps == 0:
        return _UNTRAINED
    return "retrained" if math.isnan(steps) else f"retrained for {steps:.0f} steps"


def _mask(heads: str, grid: tuple[int, ...]) -> Mask | None:
    """Of the letters in a search's table; None for another grid than the table's."""
    rows = str(heads).split()
    if {len(row) for row in rows} != {grid[1]} or len(rows) != grid[0]:
        return None
    return np.array([[letter == "G" for letter in row] for row in rows])
