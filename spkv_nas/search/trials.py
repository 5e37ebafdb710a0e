"""What a search is asked for and what it tries: effort, second objective, trials, and their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.samplers import SURROGATE
from spkv_nas.artifacts.search_table import BASELINE, Fidelity, Retraining
from spkv_nas.evaluation.paired import PairedDifference, Score


@dataclass(frozen=True)
class LayoutCost:
    """A second objective: what a layout costs, and the name and unit of that."""

    name: str
    of: Callable[[Layout], float]


GENERATION = 10  # trials, by default


@dataclass(frozen=True)
class Effort:
    """How much to search.

    Attributes:
        trials: layouts scored without training, per sampler and seed.
        samplers: kinds of sampler, those that are meant first, then the controls.
        seeds: one study each.
        short: best layouts of each sampler to retrain briefly.
        full: best of those to retrain in full.
        generation: layouts that are chosen together, by the scores of all before; it belongs to a study, as its seed.
    """

    trials: int = 100
    samplers: tuple[str, ...] = (SURROGATE,)
    seeds: tuple[int, ...] = (0,)
    short: int = 8
    full: int = 4
    generation: int = GENERATION


@dataclass(frozen=True)
class Result:
    """What a finished task tried, as text, what it measured, and whether that is an estimate of what was stopped."""

    point: str
    values: list[float]
    stopped: bool = False


@dataclass(frozen=True)
class Trial:
    """A layout that was tried, and what it measured so far; changes of NLL are against full attention."""

    sampler: str
    seed: int
    number: int
    layout: Layout
    cost: float | None
    zero_shot: Score
    short: PairedDifference | None = None
    full: PairedDifference | None = None

    @property
    def name(self) -> str:
        """Such as "density-0-17"; of a baseline, that of its layout."""
        return self.layout.strategy if self.sampler == BASELINE else f"{self.sampler}-{self.seed}-{self.number}"

    def change(self, fidelity: Fidelity) -> PairedDifference | None:
        """Change of NLL at a fidelity; None if it was not measured."""
        return {"zero_shot": self.zero_shot, "short": self.short, "full": self.full}[fidelity]

    def after(self, retraining: Retraining, change: PairedDifference | None) -> Trial:
        """The trial with what a retraining measured."""
        return replace(self, short=change) if retraining == "short" else replace(self, full=change)

    @property
    def values(self) -> list[float]:
        """The objectives without training."""
        return [self.zero_shot.percent, *([] if self.cost is None else [self.cost])]


def ranked(values: NDArray[np.float64]) -> list[int]:
    """Row numbers of ``values`` [points, objectives], best first: front after front."""
    left, order = list(range(len(values))), []
    while left:
        front = [left[index] for index in first_front(values[left])]
        order += front
        left = [index for index in left if index not in set(front)]
    return order


def first_front(values: NDArray[np.float64]) -> list[int]:
    """Rows of ``values`` that no other is as good as in all objectives and better in one, by the first objective.

    NaN is worse than any number.
    """
    values = np.where(np.isnan(values), np.inf, values)
    beaten = np.all(values[:, None] >= values[None], -1) & np.any(values[:, None] > values[None], -1)
    front: list[int] = np.flatnonzero(~beaten.any(1)).tolist()
    return sorted(front, key=lambda index: tuple(values[index]))
