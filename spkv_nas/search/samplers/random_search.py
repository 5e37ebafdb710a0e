"""Sample layouts at random, to compare other samplers with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spkv_nas.search.sampler import Sampler

if TYPE_CHECKING:
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.search.space import Space
    from spkv_nas.search.trials import Result


@dataclass(frozen=True)
class RandomSearch(Sampler):
    """Draw all sets of heads of the budget with equal probability."""

    name = "random"
    help = "heads at random"

    def layouts(
        self, space: Space, numbers: range, results: Sequence[Result], *, seed: int, starts: Sequence[Layout] = ()
    ) -> list[Layout]:
        """Return the layouts of a round, each drawn with the seed and the number of its trial."""
        return [space.random(np.random.default_rng([seed, number])) for number in numbers]
