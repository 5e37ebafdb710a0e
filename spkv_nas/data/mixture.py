"""Decide which blocks of a training run are synthetic and which are text, as pure functions of seed and position.

Blocks of a run are counted from 0 over all steps and all processes, so that every branch gets the same ones, and so
does a run that resumes. Synthetic blocks are spread evenly: any stretch contains their share, to within one block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mixture:
    """Positions of the synthetic blocks in a run.

    Attributes:
        share: share of synthetic blocks.
        phase: in [0, 1), offset of the first one.
        before: number of blocks before position 0.
        numbered_from: index of the first synthetic block.
    """

    share: float
    phase: float = 0.0
    before: int = 0
    numbered_from: int = 0

    @classmethod
    def drawn(cls, share: float, num_text: int, seed: int) -> Mixture:
        """Return a mixture for a text of ``num_text`` blocks, with a phase drawn from a seed."""
        return cls(share, float(np.random.default_rng([seed, num_text]).random()))

    def at(self, position: int) -> tuple[bool, int]:
        """Return (True if the block at ``position`` is synthetic, its index among blocks of its kind)."""
        num_synthetic = self.synthetic(position)
        if self.synthetic(position + 1) > num_synthetic:
            return True, self.numbered_from + num_synthetic
        return False, position - num_synthetic

    def synthetic(self, position: int) -> int:
        """Return the number of synthetic blocks before a position."""
        return self._until(position) - self._until(0)

    def longer(self, ratio: int, start: int) -> Mixture:
        """Return the mixture for blocks of ``ratio`` parts from the position ``start`` on, a multiple of ``ratio``."""
        return Mixture(self.share, self.phase, start // ratio, -(-self.synthetic(start) // ratio))

    def _until(self, position: int) -> int:
        """Return the number of synthetic blocks before a position, including those before position 0."""
        return math.floor(self.share * (self.before + position) + self.phase)
