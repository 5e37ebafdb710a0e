"""Define what a sampler is: it chooses the layouts that a search scores next.

A sampler is a subclass in one file. The built-in ones are listed in ``search.registry``; an installed package adds an
instance of its own by an entry point of the group ``spkv_nas.samplers``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # reads pandas, which takes too long for --help
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.search.space import Space
    from spkv_nas.search.trials import Result


class Sampler(ABC):
    """Choose the layouts of one round of trials after another.

    A sampler has no state: its layouts depend on the arguments alone, so that any number of workers, however
    interrupted, produce the same study.

    Attributes:
        name: name of the sampler, of its studies and of its trials.
        help: phrase that describes what it draws layouts by.
        takes_starts: whether it first tries the layouts that the search starts from.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    takes_starts: ClassVar[bool] = False

    @abstractmethod
    def layouts(
        self, space: Space, numbers: range, results: Sequence[Result], *, seed: int, starts: Sequence[Layout] = ()
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
