"""Test the time left that a search for the smallest budget shows, on simulated documents and a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
from marks import pairwise, slow

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.progress import Agenda, Display, Progress, Reporter
from spkv_nas.evaluation.verdict.contenders import Contender, ScoreStore
from spkv_nas.evaluation.verdict.criteria import DocumentNLLs
from spkv_nas.evaluation.verdict.criterion import Rounds
from spkv_nas.evaluation.verdict.critical_budget import (
    CriticalBudget,
    find_critical_budget,
    named_by_memory,
)
from spkv_nas.evaluation.verdict.trial import Trial

MEMORIES = (4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33, 40, 50, 60, 75)
NLL = 2.0  # of the dense model, in nats
DENSE = Contender("dense")


@dataclass
class Store:
    """Store of simulated scores, whose clock moves by a second for every round that is measured."""

    losses: dict[str, float]  # in percent, by candidate
    seed: int
    number: int = 256  # documents
    contender: Contender = DENSE
    time: float = 0.0
    known: dict[str, int] = field(default_factory=dict)

    @property
    def num_measured(self) -> int:
        return sum(self.known.values())

    def num_known(self, contender: Contender, rounds: Rounds) -> int:
        return self.known.get(contender.name, 0)

    def score(self, contender: Contender, rounds: Rounds, number: int) -> np.ndarray:
        before = self.known.get(contender.name, 0)
        self.time += max(0, number - before)
        self.known[contender.name] = max(number, before)
        random = np.random.default_rng(self.seed)
        sizes = random.gamma(4.0, 100.0, self.number)
        noise = random.normal(0.0, 0.03, self.number)
        loss = self.losses.get(contender.name, 0.0) / 100.0
        scores = (
            sizes * NLL * (1.0 + loss * (1.0 + 20.0 * noise))
            if contender != self.contender
            else sizes * NLL
        )
        return cast(np.ndarray, scores[: number * rounds.size])


class SimulatedRounds(Rounds):
    """Rounds of documents, which the store simulates."""

    identity = ""

    def __init__(self, number: int) -> None:
        self.num_samples = number

    def measure(self, index: int, model: Any, prepared: Any) -> Any:
        raise AssertionError


@dataclass
class SimulatedChooser:
    """Chooser that takes as long for the first budget as all kinds of layouts do, and less for later ones."""

    store: Store
    layouts: list[Layout]
    is_first: bool = True

    def choose(self, position: int, progress: Progress) -> Layout:
        passes = self._passes(self.is_first)
        self.is_first = False
        for done in range(1, passes + 1):
            self.store.time += 1.0 / SimulatedRounds.size
            progress(done, passes)
        return self.layouts[position]

    def passes_left(self, number: int) -> float:
        return sum(self._passes(self.is_first and index == 0) for index in range(number))

    @staticmethod
    def _passes(is_first: bool) -> int:
        return 100 if is_first else 48


def search(
    scale: float, error: float, seed: int, *, chooses: bool = False
) -> tuple[CriticalBudget, Store, list[tuple[float, float]]]:
    """Find the smallest budget where losses are multiples of a scale and costs are off by a factor.

    Return what was found, the store, and the times of all counts with the time left.
    """
    losses = [scale * 100.0 / memory**2 for memory in MEMORIES]
    layouts = [
        Layout(("GL",), 8 + number, str(memory), provenance={"cost": error * loss * NLL / 100.0})
        for number, (memory, loss) in enumerate(zip(MEMORIES, losses, strict=True))
    ]
    candidates = [Contender(layout.strategy, layout=layout) for layout in layouts]
    named = [
        named_by_memory(layout, memory).strategy
        for layout, memory in zip(layouts, MEMORIES, strict=True)
    ]
    names = named if chooses else [each.name for each in candidates]
    store = Store(dict(zip(names, losses, strict=True)), seed)
    agenda, shown = Agenda(lambda: store.time), list[tuple[float, float]]()

    @contextmanager
    def display(_: str) -> Iterator[Display]:
        def show(
            done: int, total: int, note: str = "", *, unit: str = "", left: float | None = None
        ) -> None:
            assert done <= total
            assert unit == "rounds"
            if left is not None:
                shown.append((store.time, left))

        yield show

    trial = Trial(
        [(DocumentNLLs(), 1.0)], {"nll": SimulatedRounds(store.number)}, cast(ScoreStore, store)
    )
    reporter = Reporter(display, agenda)
    memories = [float(memory) for memory in MEMORIES]
    chooser = SimulatedChooser(store, layouts) if chooses else None
    result = find_critical_budget(trial, candidates, 0.05, reporter, memories, NLL, chooser=chooser)
    return result, store, shown


QUICK = [
    parameter.values for parameter in pairwise([0.5, 1.0, 2.0, 5.0], [0.5, 1.0, 2.0], [0, 1, 2])
]
OTHERS = [
    case for case in product([0.5, 1.0, 2.0, 5.0], [0.5, 1.0, 2.0], [0, 1, 2]) if case not in QUICK
]


@pytest.mark.parametrize(("scale", "error", "seed"), [*QUICK, *map(slow, OTHERS)])
def test_time_left_of_a_search(scale: float, error: float, seed: int) -> None:
    """It is within a factor of two, and rises by no more than a half, but for a fifth of the time at the end."""
    _, store, shown = search(scale, error, seed)
    check_time_left(store.time, shown)


def check_time_left(end: float, shown: list[tuple[float, float]]) -> None:
    """Check the bounds of the time left after a tenth of the time."""
    lowest = np.inf
    assert len(shown) > 10
    for time, left in shown:
        if time >= end / 10:
            assert 0.5 * end <= time + left <= 2.0 * end
            assert left <= max(1.5 * lowest, 0.2 * end)
            lowest = min(lowest, left)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 5.0])
def test_time_left_of_a_search_that_chooses_its_layouts(scale: float, seed: int) -> None:
    """Layouts of several kinds are compared before a budget is measured, which was not part of the time."""
    _, store, shown = search(scale, error=1.0, seed=seed, chooses=True)
    check_time_left(store.time, shown)


def test_a_budget_near_the_margin_is_measured_on_all_documents() -> None:
    """It is given up early only if its loss is above the margin."""
    for seed in range(3):
        result, _, _ = search(scale=0.9, error=1.0, seed=seed)
        rows = result.rows[(result.rows["result"] == "open") & (result.rows["loss"] < 1.0)]
        assert (rows["num_samples"] == 256).all()
