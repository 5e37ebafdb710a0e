"""Define what a sampler is: it chooses the layouts that a search scores next.

A sampler is a frozen dataclass in one file, whose fields are its options (``base.entry``); studies and trials have its
name. The built-in ones are listed in ``search.registry``; a package adds its own by an entry point of the group
``spkv_nas.samplers``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from spkv_nas.base.entry import Entry

if TYPE_CHECKING:  # reads pandas, which takes too long for --help
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.search.space import Space
    from spkv_nas.search.trials import Result


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
