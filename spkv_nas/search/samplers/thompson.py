"""Sample layouts by Thompson sampling over a linear model of all scores (``search/surrogate.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spkv_nas.search.sampler import Sampler

if TYPE_CHECKING:
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.search.space import Space
    from spkv_nas.search.trials import Result


@dataclass(frozen=True)
class ThompsonSampling(Sampler):
    """Draw head weights from their posterior given all scores, and take the best layout for them."""

    name = "surrogate"
    help = "a linear model of all scores so far, started from the strategies and the head scores"
    takes_starts = True

    def layouts(
        self, space: Space, numbers: range, results: Sequence[Result], *, seed: int, starts: Sequence[Layout] = ()
    ) -> list[Layout]:
        """Return the layouts of a round, first the starts, none twice."""
        from spkv_nas.search.surrogate import Surrogate  # reads pandas, which takes too long for --help

        scored = [(space.layout(result.point), result.values[0]) for result in results]
        return Surrogate(space, seed, starts).propose(numbers, scored)

    def settings(self, space: Space) -> dict[str, Any]:
        """Name the signals that the model takes into account."""
        return {"signals": [f"{table.name} {table.content_hash}" for table in space.signals]}
