"""Define what a sampler is: it chooses the layouts that a search scores next.

A sampler is a frozen dataclass whose fields are its options; packages add theirs to the group ``spkv_nas.samplers``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from spkv_nas.base.entry import Entry

if TYPE_CHECKING:  # reads pandas, which takes too long for --help
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.contrib.search.space import Space
    from spkv_nas.contrib.search.trials import Trial

TRIALS_PER_ROUND = 10  # layouts sampled together from the scores of all earlier ones


class Sampler(Entry, ABC):
    """Choose the layouts of one round of trials after another.

    A sampler has no state: its layouts depend on the arguments alone, so that any number of workers, however
    interrupted, produce the same study.

    Attributes:
        takes_starts: whether it first tries the layouts that the search starts from.
    """

    takes_starts: ClassVar[bool] = False

    @abstractmethod
    def layouts(
        self, space: Space, numbers: range, results: Sequence[Trial], *, seed: int, starts: Sequence[Layout] = ()
    ) -> list[Layout]:
        """Return the layouts of a round.

        Args:
            space: the search space.
            numbers: numbers of the round's trials.
            results: results of all trials before them, in order.
            seed: random seed of the study.
            starts: layouts to try first; empty unless ``takes_starts``.
        """

    def settings(self, space: Space) -> dict[str, Any]:
        """Return what its layouts depend on besides the arguments, as plain values. A study with others is refused."""
        return {}


class StudySampler:
    """Sample the layouts of one study in rounds: a trial sees the results of all rounds before its own."""

    def __init__(self, space: Space, sampler: Sampler, seed: int, starts: Sequence[Layout] = ()) -> None:
        """Create the sampler of a study; layouts of the space are tried first if it takes them."""
        self._space, self._sampler, self._seed = space, sampler, seed
        self._starts = list(starts) if sampler.takes_starts else []
        self._round: tuple[int, list[Layout]] = (-1, [])  # latest round: first trial, layouts

    @staticmethod
    def first_of_round(index: int) -> int:
        """Return the first trial of the round of trial ``index``, which sees the trials before that."""
        return index - index % TRIALS_PER_ROUND

    def layout(self, index: int, results: Sequence[Trial]) -> Layout:
        """Return the layout of trial ``index``; ``results`` are those of the trials before its round, in order."""
        first = self.first_of_round(index)
        if self._round[0] != first:  # results are only read at the first trial of a round
            numbers = range(first, first + TRIALS_PER_ROUND)
            layouts = self._sampler.layouts(self._space, numbers, results, seed=self._seed, starts=self._starts)
            self._round = first, layouts
        return self._round[1][index - first]
