"""Where in a run of training its synthetic blocks come, and where its text: pure functions of seed and place.

Blocks of a run are counted from 0, over all steps and all processes, so that every branch has the same, and a run that
resumes too. Synthetic ones are spread evenly: of any stretch they have their share, but for one block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Mixture:
    """The order of a run's blocks.

    Attributes:
        share: of the blocks that are synthetic.
        num_text: blocks of text that there are; each comes once before any comes again.
    """

    share: float
    num_text: int
    seed: int

    def at(self, place: int) -> tuple[bool, int]:
        """(whether the block at ``place`` is synthetic, its number among the synthetic ones or of the text's)."""
        before = self._synthetic(place)
        if self._synthetic(place + 1) > before:
            return True, before
        epoch, number = divmod(place - before, self.num_text)
        return False, int(_shuffled(self.num_text, self.seed, epoch)[number])

    def _synthetic(self, place: int) -> int:
        """Synthetic blocks before a place."""
        return math.floor(self.share * place + self._start)

    @property
    def _start(self) -> float:
        """In [0, 1): where the first one comes."""
        return float(np.random.default_rng([self.seed, self.num_text]).random())


@lru_cache(maxsize=2)
def _shuffled(number: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of the text in an epoch."""
    return np.random.default_rng([seed, epoch, number]).permutation(number)
