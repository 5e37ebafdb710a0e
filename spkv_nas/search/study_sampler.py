"""Sample the layouts of one study in rounds: a trial sees the results of all rounds before its own.

Any number of workers, however interrupted, thus produce the same study.
"""

from __future__ import annotations

from collections.abc import Sequence

from spkv_nas.artifacts.layout import Layout
from spkv_nas.search.sampler import Sampler
from spkv_nas.search.space import Space
from spkv_nas.search.trials import TRIALS_PER_ROUND, Result


class StudySampler:
    """Sampler of one study's layouts.

    Args:
        space: the search space.
        sampler: chooses the layouts of a round.
        seed: random seed of the study.
        starts: layouts of the space to try first, if the sampler takes them.
    """

    def __init__(self, space: Space, sampler: Sampler, seed: int, starts: Sequence[Layout] = ()) -> None:
        """Create the sampler; it holds no state that affects its layouts."""
        self._space, self._sampler, self._seed = space, sampler, seed
        self._starts = list(starts) if sampler.takes_starts else []
        self._round: tuple[int, list[Layout]] = (-1, [])  # latest round: first trial, layouts

    @staticmethod
    def first_of_round(index: int) -> int:
        """Return the first trial of the round of trial ``index``, which sees the trials before that."""
        return index - index % TRIALS_PER_ROUND

    def layout(self, index: int, results: Sequence[Result]) -> Layout:
        """Return the layout of trial ``index``.

        Args:
            index: number of the trial.
            results: results of the trials before its round, in order; only read at the first of a round.
        """
        first = self.first_of_round(index)
        if self._round[0] != first:
            numbers = range(first, first + TRIALS_PER_ROUND)
            layouts = self._sampler.layouts(self._space, numbers, results, seed=self._seed, starts=self._starts)
            self._round = first, layouts
        return self._round[1][index - first]
