"""Choose each block of a run, as pure functions of seed and position: text or synthetic, and which block of text.

Blocks are counted from 0 over all steps and all processes, so that every branch gets the same ones, and so does a run
that resumes. Synthetic blocks are spread evenly: any stretch contains their share, to within one block.

An epoch contains each block once, in its own order. Longer blocks consist of neighbouring ones, and come in the order
in which the first of their parts would have come; what remains of the epoch in which they begin are those with no part
read so far. Blocks that "grow" to their current length continue unchanged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

Permutation = Callable[[int, int, int], NDArray[np.int64]]  # (number of blocks, seed, epoch) -> block indices


@dataclass(frozen=True)
class BlockOrder:
    """Order of a text's blocks over the epochs of a run."""

    permutation: Permutation  # order of the ``num_blocks`` blocks in an epoch, ``mixed_order`` or ``library_order``
    num_blocks: int  # number of blocks
    seed: int  # seed of the order
    per_epoch: int  # number of blocks that are read per epoch; the others are skipped
    ratio: int = 1  # number of parts in a longer block
    start: int = 0  # number of parts read before the first longer block

    def at(self, number: int) -> int:
        """Return the index of the block that comes after ``number`` others."""
        epoch, read = divmod(self.start, self.per_epoch)
        # Finish the epoch in which the longer blocks begin, then read whole epochs
        first = _epoch(self, epoch, read)
        if number < len(first):
            return int(first[number])
        later, position = divmod(number - len(first), min(self.per_epoch, self.num_blocks // self.ratio))
        return int(_epoch(self, epoch + 1 + later, 0)[position])

    def longer(self, ratio: int, start: int) -> "BlockOrder":
        """Return the order of blocks of ``ratio`` parts after ``start`` parts; its ``at`` counts from there."""
        return replace(self, ratio=ratio, start=start)


@lru_cache(maxsize=4)
def _epoch(order: BlockOrder, epoch: int, read: int) -> NDArray[np.int64]:
    """Return the blocks of an epoch with no part among the first ``read``."""
    positions = np.argsort(order.permutation(order.num_blocks, order.seed, epoch))
    num_whole = order.num_blocks // order.ratio
    first = positions[: num_whole * order.ratio].reshape(num_whole, order.ratio).min(1)
    blocks: NDArray[np.int64] = np.argsort(first)[: order.per_epoch]
    unread: NDArray[np.int64] = blocks[first[blocks] >= read]
    return unread


def mixed_order(num_blocks: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order for a text with samples mixed in."""
    return np.random.default_rng([seed, epoch, num_blocks]).permutation(num_blocks)


def library_order(num_blocks: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of accelerate's ``SeedableRandomSampler``."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed + epoch))
    return np.asarray(order.numpy(), dtype=np.int64)


@dataclass(frozen=True)
class Mixture:
    """Positions of the synthetic blocks in a run."""

    share: float  # share of synthetic blocks
    phase: float = 0.0  # in [0, 1), offset of the first one
    before: int = 0  # number of blocks before position 0
    numbered_from: int = 0  # index of the first synthetic block

    @classmethod
    def drawn(cls, share: float, num_text: int, seed: int) -> "Mixture":
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

    def longer(self, ratio: int, start: int) -> "Mixture":
        """Return the mixture for blocks of ``ratio`` parts from the position ``start`` on, a multiple of ``ratio``."""
        return Mixture(self.share, self.phase, start // ratio, -(-self.synthetic(start) // ratio))

    def _until(self, position: int) -> int:
        """Return the number of synthetic blocks before a position, including those before position 0."""
        return math.floor(self.share * (self.before + position) + self.phase)
