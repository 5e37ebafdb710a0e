"""The table of tasks: values with their errors, densities, and differences to another checkpoint, paired by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from spkv_nas.artifacts.result_tables import TASKS
from spkv_nas.base.statistics import mean_and_error
from spkv_nas.evaluation.tasks.run import Found
from spkv_nas.evaluation.tasks.suite import Asked

_RESAMPLES = 200  # of samples, for the error of what is no mean of them


@dataclass(frozen=True)
class Results:
    """What a name stands for, and by task what a checkpoint gave, and another one if there is one."""

    asked: Asked
    own: Sequence[Found]
    against: Sequence[Found] | None = None


class _Cell(NamedTuple):
    """Of a metric of a task: the columns from ``num_samples`` on."""

    num_samples: int
    value: float
    standard_error: float
    density: float
    against: float
    against_density: float
    difference: float
    difference_standard_error: float


def tasks_table(results: Sequence[Results]) -> pd.DataFrame:
    """One row for each metric of each name, columns of ``TASKS``, and of several names the average of their first rows,
    of those that are means of samples.

    A group has the means of its tasks, by samples where lm-eval says so. ``difference`` is the checkpoint's value minus
    the other's, its error that of the difference by sample; NaN where there is no other, or a single sample.
    """
    rows: list[tuple[Any, ...]] = []
    firsts = []
    for one in results:
        cells = _cells(one)
        rows += [(one.asked.name, metric, one.asked.num_fewshot, *cell) for metric, cell in cells]
        if cells[0][0] not in one.own[0].wholes:
            firsts.append(cells[0][1])
    if len(firsts) > 1:
        rows.append((f"average of {len(firsts)}", "first of each", np.nan, *_mean(firsts, by_size=False)))
    return pd.DataFrame(rows, columns=TASKS.header)


def _cells(results: Results) -> list[tuple[str, _Cell]]:
    """(metric, its cell) of each row of a name."""
    asked, own = results.asked, results.own
    others: Sequence[Found | None] = results.against or [None] * len(own)
    return [
        (metric, _mean([_cell(metric, *pair) for pair in zip(own, others, strict=True)], by_size=asked.by_size))
        for metric in own[0].values
        if not asked.metrics or metric.partition(" (")[0] in asked.metrics
    ]


def _cell(metric: str, own: Found, against: Found | None) -> _Cell:
    values = own.values[metric]
    whole = own.wholes.get(metric)
    value, error = _spread(whole, values)
    if against is None:
        nan = float("nan")
        return _Cell(len(values), value, error, own.density, nan, nan, nan, nan)
    others = against.values[metric]
    other, _ = _spread(whole, others)
    difference = _spread(whole, values, others)
    return _Cell(len(values), value, error, own.density, other, against.density, *difference)


def _spread(whole: Callable[[list[Any]], float] | None, *models: list[Any]) -> tuple[float, float]:
    """(value of the first model, or its difference to the second, its standard error) from values by sample.

    The error of what is no mean of them is that of resampling, the same samples of both models.
    """
    if whole is None:
        first, *rest = (np.asarray(values, dtype=float) for values in models)
        return mean_and_error(first - rest[0] if rest else first)

    def found(samples: Any) -> float:
        first, *rest = (float(whole([values[i] for i in samples])) for values in models)
        return first - rest[0] if rest else first

    number = len(models[0])
    rng = np.random.default_rng(0)
    drawn = [found(rng.integers(number, size=number)) for _ in range(_RESAMPLES)]
    return found(range(number)), float(np.std(drawn, ddof=1))


def _mean(cells: Sequence[_Cell], *, by_size: bool) -> _Cell:
    """The mean of the cells of several tasks, whose samples are independent."""
    sizes = np.array([cell.num_samples for cell in cells]) if by_size else np.ones(len(cells))
    shares = sizes / sizes.sum()
    columns = dict(zip(_Cell._fields, np.array(cells).T, strict=True))
    found: dict[str, Any] = {
        name: float(np.sqrt(((shares * column) ** 2).sum()) if name.endswith("error") else (shares * column).sum())
        for name, column in columns.items()
    }
    found["num_samples"] = sum(cell.num_samples for cell in cells)
    return _Cell(**found)
