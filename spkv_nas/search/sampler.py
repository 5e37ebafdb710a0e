"""Points of a search whose every trial depends on its seed, its number, and whole generations before it alone.

Optuna's samplers look at whatever has finished when they are asked, so that a study of several workers, or one that was
killed and taken up again, is never the same twice. Here trials come in generations of a size that belongs to the study:
a trial sees the results of all generations before its own, in order, and draws with a generator seeded by the study's
seed and its own number. So any number of workers, however interrupted, make the same study.
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
    """Draws the layouts of one study.

    Args:
        kind: ``surrogate`` and ``density`` start from given layouts and fill the first generation with layouts near
            the densest heads. ``surrogate`` goes on by a linear model of all scores (``search/surrogate.py``);
            ``density`` by TPE (``search/tpe.py``), whose wishes the densities complete. ``tpe`` does the same without
            densities or starts; ``random`` draws all sets of heads with the same probability.
        starts: layouts of the space that ``surrogate`` and ``density`` try first.
        generation: trials that do not know each other's results.
    """

    def __init__(
        self, space: Space, kind: str, seed: int, starts: Sequence[Layout] = (), *, generation: int = GENERATION
    ) -> None:
        self._space, self._kind, self._seed, self._size = space, kind, seed, generation
        self._starts = list(starts) if kind in (SURROGATE, DENSITY) else []
        self._surrogate = Surrogate(space, seed, self._starts)
        self._generation: tuple[int, list[Layout]] = (-1, [])  # the surrogate's latest, and where it begins

    def first_of_generation(self, index: int) -> int:
        """Number of the first trial in the generation of trial ``index``: it may know the trials before that."""
        return index - index % self._size

    def known_before(self, index: int) -> int:
        """Number of the trials that must be finished before trial ``index`` begins, the first ones.

        Its layout depends on those of the generations before its own alone; its rival may be a start too.
        """
        starts = len(self._starts)
        return max(self.first_of_generation(index), starts if index >= starts else 0)

    def layout(self, index: int, known: Sequence[Result]) -> Layout:
        """The layout of trial ``index``, given at least the trials before its generation."""
        known = known[: self.first_of_generation(index)]
        if self._kind == SURROGATE:
            return self._learnt(self.first_of_generation(index), known)[index % self._size]
        if index < len(self._starts):
            return self._starts[index]
        generator = np.random.default_rng([self._seed, index])
        noise = generator.random(self._space.grid)
        low, high = self._space.budgets
        budget = int(generator.integers(low, high + 1))
        suggested = self._wished(known, generator) if known and self._kind != RANDOM else None
        return self._space.nearest(suggested, budget, noise, by_density=self._kind == DENSITY)

    def _learnt(self, first: int, known: Sequence[Result]) -> list[Layout]:
        """The layouts of the generation that begins with trial ``first``; whoever asks for one makes them all."""
        if self._generation[0] != first:
            scored = [(self._space.layout(result.point), result.values[0]) for result in known]
            self._generation = first, self._surrogate.propose(range(first, first + self._size), scored)
        return self._generation[1]

    def _wished(self, known: Sequence[Result], generator: np.random.Generator) -> NDArray[np.bool_]:
        """The heads that TPE would make global next, [L, Hkv]."""
        masks = np.stack([self._space.layout(result.point).global_mask.ravel() for result in known])
        values = np.array([result.values for result in known])
        return suggest_mask(masks, values, generator).reshape(self._space.grid)
