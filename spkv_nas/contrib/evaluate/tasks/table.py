"""Tabulate tasks: values with standard errors, densities, and differences to another checkpoint, paired by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from spkv_nas.artifacts.result_tables import TASKS
from spkv_nas.base.statistics import mean_and_error
from spkv_nas.contrib.evaluate.tasks.run import TaskResult
from spkv_nas.contrib.evaluate.tasks.suite import SelectedTasks

_RESAMPLES = 200  # bootstrap resamples for the error of metrics that are not means over samples


@dataclass(frozen=True)
class Results:
    """Task results for one name, of a checkpoint and optionally of another.

    Attributes:
        selected: tasks that the name stands for.
        results: results of the checkpoint, by task.
        against: results of another checkpoint, by task; None without one.
    """

    selected: SelectedTasks
    results: Sequence[TaskResult]
    against: Sequence[TaskResult] | None = None


class _Cell(NamedTuple):
    """One metric of a task: the columns from ``num_samples`` on."""

    num_samples: int
    value: float
    standard_error: float
    density: float
    against: float
    against_density: float
    difference: float
    difference_standard_error: float


def tasks_table(results: Sequence[Results]) -> pd.DataFrame:
    """Return one row per metric of each name, columns of ``TASKS``, and an average over several names.

    The average is over the first metric of each name, if it is a mean over samples. A group averages its tasks,
    weighted by samples where lm-eval defines it so. ``difference`` is the checkpoint's value minus that of the other
    checkpoint, with the error of the difference by sample; NaN without another checkpoint, or for a single sample.
    """
    rows: list[tuple[Any, ...]] = []
    firsts = []
    for result in results:
        cells = _cells(result)
        rows += [(result.selected.name, metric, result.selected.num_fewshot, *cell) for metric, cell in cells]
        if cells[0][0] not in result.results[0].wholes:
            firsts.append(cells[0][1])
    if len(firsts) > 1:
        rows.append((f"average of {len(firsts)}", "first metric of each", np.nan, *_mean(firsts, by_size=False)))
    return pd.DataFrame(rows, columns=TASKS.header)


def _cells(results: Results) -> list[tuple[str, _Cell]]:
    """Return (metric, its cell) of each row of a name."""
    selected, task_results = results.selected, results.results
    against: Sequence[TaskResult | None] = results.against or [None] * len(task_results)
    pairs = list(zip(task_results, against, strict=True))
    return [
        (metric, _mean([_cell(metric, *pair) for pair in pairs], by_size=selected.by_size))
        for metric in task_results[0].values
        if not selected.metrics or metric.partition(" (")[0] in selected.metrics
    ]


def _cell(metric: str, result: TaskResult, against: TaskResult | None) -> _Cell:
    """Return the cell of a metric of one task."""
    values = result.values[metric]
    aggregate = result.wholes.get(metric)
    value, error = _spread(aggregate, values)
    if against is None:
        nan = float("nan")
        return _Cell(len(values), value, error, result.density, nan, nan, nan, nan)
    against_values = against.values[metric]
    against_value, _ = _spread(aggregate, against_values)
    difference = _spread(aggregate, values, against_values)
    return _Cell(len(values), value, error, result.density, against_value, against.density, *difference)


def _spread(metric_function: Callable[[list[Any]], float] | None, *models: list[Any]) -> tuple[float, float]:
    """Compute the value of the first model, or its difference to the second, and its standard error.

    The error of a metric that is not a mean over samples is from resampling, with the same samples for both models.

    Args:
        metric_function: aggregates values; None is the mean.
        models: values by sample of one or two models.
    """
    # Compute the error of a mean directly
    if metric_function is None:
        first, *others = (np.asarray(values, dtype=float) for values in models)
        return mean_and_error(first - others[0] if others else first)

    def aggregate(samples: Any) -> float:
        first, *others = (float(metric_function([values[i] for i in samples])) for values in models)
        return first - others[0] if others else first

    num_samples = len(models[0])
    # Resample the samples, the same for both models
    rng = np.random.default_rng(0)
    resampled = [aggregate(rng.integers(num_samples, size=num_samples)) for _ in range(_RESAMPLES)]
    return aggregate(range(num_samples)), float(np.std(resampled, ddof=1))


def _mean(cells: Sequence[_Cell], *, by_size: bool) -> _Cell:
    """Return the mean of the cells of several tasks, whose samples are independent."""
    sizes = np.array([cell.num_samples for cell in cells]) if by_size else np.ones(len(cells))
    weights = sizes / sizes.sum()
    columns = dict(zip(_Cell._fields, np.array(cells).T, strict=True))
    means: dict[str, Any] = {
        name: float(np.sqrt(((weights * column) ** 2).sum()) if name.endswith("error") else (weights * column).sum())
        for name, column in columns.items()
    }
    means["num_samples"] = sum(cell.num_samples for cell in cells)
    return _Cell(**means)
