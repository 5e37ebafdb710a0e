"""Sample layouts reproducibly: each trial depends only on its seed, its number and the generations before it.

Optuna's samplers use whatever trials have finished when they are called, so studies with several workers, and
interrupted studies, are not reproducible. Here trials come in generations of a fixed size per study: a trial sees the
results of all generations before its own, in order, and uses a generator seeded by the study's seed and its own number.
Any number of workers, however interrupted, thus produce the same study.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.samplers import DENSITY, RANDOM, SURROGATE
from spkv_nas.search.space import Space
from spkv_nas.search.surrogate import Surrogate
from spkv_nas.search.tpe import suggest_mask
from spkv_nas.search.trials import GENERATION, Result


class Sampler:
    """Sampler of one study's layouts.

    Args:
        space: the search space.
        kind: ``surrogate`` and ``density`` first try ``starts`` and fill the first generation with layouts near the
            densest heads. Then ``surrogate`` uses a linear model of all scores (``search/surrogate.py``); ``density``
            uses TPE (``search/tpe.py``) and completes its suggestions by density. ``tpe`` does the same without
            densities or starts; ``random`` samples all sets of heads uniformly.
        seed: random seed of the study.
        starts: layouts of the space that ``surrogate`` and ``density`` try first.
        generation: number of trials that do not see each other's results.
    """

    def __init__(
        self, space: Space, kind: str, seed: int, starts: Sequence[Layout] = (), *, generation: int = GENERATION
    ) -> None:
        """Create the sampler; it holds no state that affects its layouts."""
        self._space, self._kind, self._seed, self._size = space, kind, seed, generation
        self._starts = list(starts) if kind in (SURROGATE, DENSITY) else []
        self._surrogate = Surrogate(space, seed, self._starts)
        self._generation: tuple[int, list[Layout]] = (
            -1,
            [],
        )  # latest generation of the surrogate: first trial, layouts

    def first_of_generation(self, index: int) -> int:
        """Return the first trial of the generation of trial ``index``, which sees the trials before that."""
        return index - index % self._size

    def num_prior_results(self, index: int) -> int:
        """Return how many of the first trials must be finished before trial ``index`` can start.

        Its layout depends on earlier generations only, but its rival for early stopping may also be a starting layout.
        """
        starts = len(self._starts)
        return max(self.first_of_generation(index), starts if index >= starts else 0)

    def layout(self, index: int, known: Sequence[Result]) -> Layout:
        """Return the layout of trial ``index``.

        Args:
            index: number of the trial.
            known: results of at least the trials before its generation, in order.
        """
        known = known[: self.first_of_generation(index)]
        if self._kind == SURROGATE:
            return self._surrogate_layouts(self.first_of_generation(index), known)[index % self._size]
        if index < len(self._starts):
            return self._starts[index]
        generator = np.random.default_rng([self._seed, index])
        noise = generator.random(self._space.grid)
        low, high = self._space.budgets
        budget = int(generator.integers(low, high + 1))
        suggested = self._suggested(known, generator) if known and self._kind != RANDOM else None
        return self._space.nearest(suggested, budget, noise, by_density=self._kind == DENSITY)

    def _surrogate_layouts(self, first: int, known: Sequence[Result]) -> list[Layout]:
        """Return the layouts of the surrogate's generation that starts with trial ``first``, cached."""
        if self._generation[0] != first:
            scored = [(self._space.layout(result.point), result.values[0]) for result in known]
            self._generation = first, self._surrogate.propose(range(first, first + self._size), scored)
        return self._generation[1]

    def _suggested(self, known: Sequence[Result], generator: np.random.Generator) -> NDArray[np.bool_]:
        """Return the mask [L, Hkv] of heads that TPE suggests to make global."""
        masks = np.stack([self._space.layout(result.point).global_mask.ravel() for result in known])
        values = np.array([result.values for result in known])
        return suggest_mask(masks, values, generator).reshape(self._space.grid)
