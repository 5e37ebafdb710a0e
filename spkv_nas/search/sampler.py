"""Points of a search whose every trial depends on its seed, its number, and whole generations before it alone.

Optuna's samplers look at whatever has finished when they are asked, so that a study of several workers, or one that was
killed and taken up again, is never the same twice. Here trials come in generations of ``GENERATION``: a trial sees the
results of all generations before its own, in order, and draws with a generator seeded by the study's seed and its own
number. So any number of workers, however interrupted, make the same study.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import optuna
from optuna.samplers import TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.samplers import DENSITY, RANDOM, SURROGATE
from spkv_nas.search.space import Point, Space
from spkv_nas.search.surrogate import Surrogate

GENERATION = 10


def first_of_generation(index: int) -> int:
    """Number of the first trial in the generation of trial ``index``: it may know the trials before that."""
    return index - index % GENERATION


class Sampler:
    """Draws the points of one study.

    Args:
        kind: ``surrogate`` and ``density`` start from given layouts and fill the first generation with layouts near
            the densest heads. ``surrogate`` goes on by a linear model of all scores (``search/surrogate.py``);
            ``density`` by TPE (tree-structured Parzen estimator, Bergstra et al. 2011, as Optuna has it), whose wishes
            the densities complete. ``tpe`` does the same without densities or starts; ``random`` draws all sets of
            heads with the same probability.
        starts: layouts of the space that ``surrogate`` and ``density`` try first.
    """

    def __init__(
        self,
        space: Space,
        kind: str,
        seed: int,
        directions: Sequence[StudyDirection],
        starts: Sequence[Layout] = (),
    ) -> None:
        self._space, self._kind, self._seed, self._directions = space, kind, seed, list(directions)
        self._starts = list(starts) if kind in (SURROGATE, DENSITY) else []
        self._surrogate = Surrogate(space, seed, self._starts)
        self._generation: tuple[int, list[Layout]] = (-1, [])  # the surrogate's latest, and where it begins
        self._memory: optuna.Study | None = None  # of the trials before the generation
        self._remembered = -1  # number of them

    def known_before(self, index: int) -> int:
        """Number of the trials that must be finished before trial ``index`` begins, the first ones.

        Its point depends on those of the generations before its own alone; its rival may be a start too.
        """
        starts = len(self._starts)
        return max(first_of_generation(index), starts if index >= starts else 0)

    def point(self, index: int, known: Sequence[FrozenTrial]) -> Point:
        """The point of trial ``index``, given at least the trials before its generation."""
        known = known[: first_of_generation(index)]
        if self._kind == SURROGATE:
            return self._space.point(self._learnt(first_of_generation(index), known)[index % GENERATION])
        if index < len(self._starts):
            return self._space.point(self._starts[index])
        generator = np.random.default_rng([self._seed, index])
        noise = generator.random(self._space.grid)
        low, high = self._space.budgets
        budget = int(generator.integers(low, high + 1))
        estimates = known and self._kind != RANDOM
        wished = self._estimated(known, int(generator.integers(2**31))) if estimates else None
        return self._space.point(self._space.nearest(wished, budget, noise, by_density=self._kind == DENSITY))

    def _learnt(self, first: int, known: Sequence[FrozenTrial]) -> list[Layout]:
        """The layouts of the generation that begins with trial ``first``; whoever asks for one makes them all."""
        if self._generation[0] != first:
            scored = [(self._space.layout(trial.params), trial.values[0]) for trial in known]
            self._generation = first, self._surrogate.propose(range(first, first + GENERATION), scored)
        return self._generation[1]

    def _estimated(self, known: Sequence[FrozenTrial], seed: int) -> Layout:
        """What TPE would try next."""
        if self._memory is None or self._remembered != len(known):
            self._memory, self._remembered = optuna.create_study(directions=self._directions), len(known)
            self._memory.add_trials(
                create_trial(params=trial.params, distributions=trial.distributions, values=trial.values)
                for trial in known
            )  # fmt: skip
        self._memory.sampler = TPESampler(seed=seed, n_startup_trials=1, multivariate=False)
        trial = self._memory.ask(self._space.distributions)
        self._memory.tell(trial, state=TrialState.FAIL)  # the next one of this generation must not see it
        return self._space.layout(trial.params)
