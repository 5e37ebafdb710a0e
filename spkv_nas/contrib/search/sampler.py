"""Choose the layouts that a search scores next: by Thompson sampling, or at random to compare with.

A sampler is a frozen dataclass whose fields are its options; packages add theirs to the group ``spkv_nas.samplers``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from spkv_nas.base import registry
from spkv_nas.base.arrays import Float

if TYPE_CHECKING:  # pandas and scipy take too long for --help
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.contrib.search.space import Space, Trial


TRIALS_PER_ROUND = 10  # layouts sampled together from the scores of all earlier ones


class Sampler(registry.Entry, ABC):
    """Choose the layouts of one round of trials after another.

    A sampler has no state: its layouts depend on the arguments alone, so that any number of workers, however
    interrupted, produce the same study.
    """

    # Whether it first tries the layouts that the search starts from
    takes_starts: ClassVar[bool] = False

    @abstractmethod
    def layouts(
        self,
        space: Space,
        numbers: range,
        results: Sequence[Trial],
        *,
        seed: int,
        starts: Sequence[Layout] = (),
    ) -> list[Layout]:
        """Return the layouts of a round.

        Args:
            space: the search space.
            numbers: numbers of the round's trials.
            results: results of all trials before them, in order.
            seed: random seed of the study.
            starts: layouts to try first; empty unless ``takes_starts``.
        """


@dataclass(frozen=True)
class ThompsonSampling(Sampler):
    """Draw head weights from their posterior given all scores, and take the best layout for them.

    Heads with uncertain weights are tried because a draw may rate them high, until the scores rule that out. Draws are
    scaled towards the mean by a random factor, because full draws with a weight per head explore for too long
    (reports/LOG.md). With a second objective each layout draws its number of global heads, and thereby the trade-off of
    cost against NLL.
    """

    name = "surrogate"
    help = "a linear model of all scores so far, started from the strategies and the head scores"
    takes_starts = True

    def layouts(
        self,
        space: Space,
        numbers: range,
        results: Sequence[Trial],
        *,
        seed: int,
        starts: Sequence[Layout] = (),
    ) -> list[Layout]:
        """Return the layouts of a round, first the starts, none twice while untried ones are left.

        After the starts they are sorted, so that consecutive layouts share as many layers as possible.
        """
        from spkv_nas.contrib.search.head_weights import HeadWeights
        from spkv_nas.contrib.search.space import ranks

        signal: Float = space.table.density.ravel()
        # Fit the head weights to the finite scores; None if there are too few
        finite = [result for result in results if np.isfinite(result.zero_shot.percent)]
        weights = None
        if finite:
            masks = np.stack([result.layout.global_mask.ravel() for result in finite])
            scores = np.array([result.zero_shot.percent for result in finite])
            weights = HeadWeights.of(masks, scores, signal[:, None])
        # Propose starting layouts first, then untried ones
        first = list(starts[numbers.start : numbers.stop])
        tried = {layout.heads for layout in first} | {result.layout.heads for result in results}
        proposals: list[Layout] = []
        for number in numbers[len(first) :]:
            generator = np.random.default_rng([seed, number])
            budget = int(generator.integers(space.budgets[0], space.budgets[1] + 1))
            # Without a model yet, stay near the best heads of the table
            if weights is None:
                gain = ranks(signal) + generator.random(len(signal))
            else:
                gain = weights.draw(generator, spread=generator.random())
            layout = space.optimum(gain.reshape(space.table.grid), budget, tried)
            proposals.append(layout)
            tried.add(layout.heads)
        return [*first, *sorted(proposals, key=lambda layout: layout.heads)]


@dataclass(frozen=True)
class RandomSearch(Sampler):
    """Draw all sets of heads of the budget with equal probability."""

    name = "random"
    help = "heads at random"

    def layouts(
        self,
        space: Space,
        numbers: range,
        results: Sequence[Trial],
        *,
        seed: int,
        starts: Sequence[Layout] = (),
    ) -> list[Layout]:
        """Return the layouts of a round, each drawn with the seed and the number of its trial."""
        return [space.random(np.random.default_rng([seed, number])) for number in numbers]


SAMPLERS: registry.Registry[Sampler] = registry.Registry(
    "spkv_nas.samplers",
    "sampler",
    Sampler,  # type: ignore[type-abstract]
    (ThompsonSampling(), RandomSearch()),
)


@dataclass(frozen=True)
class Effort:
    """Effort of a search."""

    trials: int = 100  # layouts to score without training
    sampler: str = ThompsonSampling.name
    seed: int = 0
    num_retrained: int = 4  # best layouts to retrain, besides those to compare with


@dataclass
class StudySampler:
    """Sample the layouts of one study in rounds: a trial sees the results of all rounds before its own."""

    space: Space
    sampler: Sampler
    seed: int
    starts: Sequence[Layout] = ()  # of the space, tried first if the sampler takes them
    _round: tuple[int, list[Layout]] = (-1, [])  # latest round: first trial, layouts

    @staticmethod
    def first_of_round(index: int) -> int:
        """Return the first trial of the round of trial ``index``, which sees the trials before that."""
        return index - index % TRIALS_PER_ROUND

    def layout(self, index: int, results: Sequence[Trial]) -> Layout:
        """Return the layout of trial ``index``; ``results`` are those of the trials before its round, in order."""
        first = self.first_of_round(index)
        # Results are only read at the first trial of a round
        if self._round[0] != first:
            numbers = range(first, first + TRIALS_PER_ROUND)
            starts = self.starts if self.sampler.takes_starts else ()
            layouts = self.sampler.layouts(
                self.space, numbers, results, seed=self.seed, starts=starts
            )
            self._round = first, layouts
        return self._round[1][index - first]
