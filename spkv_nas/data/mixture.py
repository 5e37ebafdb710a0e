"""Where in a run of training its synthetic blocks come, and where its text: pure functions of seed and place.

Blocks of a run are counted from 0, over all steps and all processes, so that every branch has the same, and a run that
resumes too. Synthetic ones are spread evenly: of any stretch they have their share, but for one block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mixture:
    """Which blocks of a run are synthetic.

    Attributes:
        share: of the blocks.
        phase: in [0, 1), where the first one comes.
        before: blocks before the first place.
        numbered_from: the number of the first synthetic one.
    """

    share: float
    phase: float = 0.0
    before: int = 0
    numbered_from: int = 0

    @classmethod
    def drawn(cls, share: float, num_text: int, seed: int) -> Mixture:
        """A mixture with a text of ``num_text`` blocks, from a seed."""
        return cls(share, float(np.random.default_rng([seed, num_text]).random()))

    def at(self, place: int) -> tuple[bool, int]:
        """(whether the block at ``place`` is synthetic, its number among the synthetic ones or the text's)."""
        found = self.synthetic(place)
        if self.synthetic(place + 1) > found:
            return True, self.numbered_from + found
        return False, place - found

    def synthetic(self, place: int) -> int:
        """Synthetic blocks before a place."""
        return self._until(place) - self._until(0)

    def longer(self, ratio: int, start: int) -> Mixture:
        """The same share of blocks of ``ratio`` parts, from the place ``start`` on, a multiple of it."""
        return Mixture(self.share, self.phase, start // ratio, -(-self.synthetic(start) // ratio))

    def _until(self, place: int) -> int:
        return math.floor(self.share * (self.before + place) + self.phase)
