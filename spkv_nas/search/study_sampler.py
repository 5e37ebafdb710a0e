"""Sample the layouts of one study reproducibly: each trial depends only on its seed, its number and earlier rounds.

Optuna's samplers use whatever trials have finished when they are called, so studies with several workers, and
interrupted studies, are not reproducible. Here trials come in rounds of a fixed size per study: a trial sees the
results of all rounds before its own, in order. Any number of workers, however interrupted, thus produce the same study.
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
        trials_per_round: number of trials that do not see each other's results.
    """

    def __init__(
        self,
        space: Space,
        sampler: Sampler,
        seed: int,
        starts: Sequence[Layout] = (),
        *,
        trials_per_round: int = TRIALS_PER_ROUND,
    ) -> None:
        """Create the sampler; it holds no state that affects its layouts."""
        self._space, self._sampler, self._seed, self._size = space, sampler, seed, trials_per_round
        self._starts = list(starts) if sampler.takes_starts else []
        self._round: tuple[int, list[Layout]] = (-1, [])  # latest round: first trial, layouts

    def first_of_round(self, index: int) -> int:
        """Return the first trial of the round of trial ``index``, which sees the trials before that."""
        return index - index % self._size

    def num_prior_results(self, index: int) -> int:
        """Return how many of the first trials must be finished before trial ``index`` can start.

        Its layout depends on earlier rounds only, but its incumbent for early stopping may also be a starting layout.
        """
        starts = len(self._starts)
        return max(self.first_of_round(index), starts if index >= starts else 0)

    def layout(self, index: int, results: Sequence[Result]) -> Layout:
        """Return the layout of trial ``index``.

        Args:
            index: number of the trial.
            results: results of at least the trials before its round, in order.
        """
        first = self.first_of_round(index)
        if self._round[0] != first:
            numbers = range(first, first + self._size)
            layouts = self._sampler.layouts(self._space, numbers, results[:first], seed=self._seed, starts=self._starts)
            self._round = first, layouts
        return self._round[1][index - first]
