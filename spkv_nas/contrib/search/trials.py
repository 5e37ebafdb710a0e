"""Define the search effort, the second objective, trials, and their Pareto order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import BASELINE, Fidelity
from spkv_nas.contrib import defaults
from spkv_nas.evaluation.paired import PairedDifference


@dataclass(frozen=True)
class LayoutCost:
    """A second objective: the cost of a layout, with its name and unit."""

    name: str
    of: Callable[[Layout], float]


@dataclass(frozen=True)
class Effort:
    """Effort of a search."""

    trials: int = 100  # layouts to score without training
    sampler: str = defaults.SAMPLER  # name of the sampler
    seed: int = 0
    num_retrained: int = 4  # best layouts to retrain, besides those to compare with


@dataclass(frozen=True)
class Trial:
    """A tried layout and its measurements so far; changes of NLL are relative to full attention."""

    sampler: str
    seed: int
    number: int
    layout: Layout
    cost: float | None
    zero_shot: PairedDifference
    short: PairedDifference | None = None
    full: PairedDifference | None = None

    @property
    def name(self) -> str:
        """Return the name, such as "surrogate-0-17"; for a baseline, the name of its layout."""
        return self.layout.strategy if self.sampler == BASELINE else f"{self.sampler}-{self.seed}-{self.number}"

    def change(self, fidelity: Fidelity) -> PairedDifference | None:
        """Return the change of NLL at a fidelity; None if it was not measured."""
        return {"zero_shot": self.zero_shot, "short": self.short, "full": self.full}[fidelity]

    @property
    def values(self) -> list[float]:
        """Return the objectives without training: change of NLL in percent, then the cost if there is one."""
        return [self.zero_shot.percent, *([] if self.cost is None else [self.cost])]


def best_start(trials: Sequence[Trial], starts: Mapping[str, Layout]) -> Trial | None:
    """Return the baseline with the lowest NLL without training among the layouts that a search starts from."""
    baselines = [trial for trial in trials if trial.sampler == BASELINE and trial.layout.strategy in starts]
    return min(baselines, key=lambda trial: trial.zero_shot.percent, default=None)


def ranked(values: NDArray[np.float64]) -> list[int]:
    """Return the row numbers of ``values`` [points, objectives] by successive Pareto fronts, best first."""
    remaining, order = list(range(len(values))), []
    while remaining:
        front = [remaining[index] for index in first_front(values[remaining])]
        order += front
        remaining = [index for index in remaining if index not in set(front)]
    return order


def first_front(values: NDArray[np.float64]) -> list[int]:
    """Return the rows of ``values`` on the Pareto front, sorted by the first objective.

    A row is on the front if no other is at least as good in all objectives and better in one. NaN is worse than any
    number.
    """
    values = np.where(np.isnan(values), np.inf, values)
    dominated = np.all(values[:, None] >= values[None], -1) & np.any(values[:, None] > values[None], -1)
    front: list[int] = np.flatnonzero(~dominated.any(1)).tolist()
    return sorted(front, key=lambda index: tuple(values[index]))
