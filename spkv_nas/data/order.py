"""The order in which a run reads its text: pure functions of seed and place, also where its blocks grow longer.

An epoch has each block once, in an order of its own. Longer blocks are made of neighbouring ones, and come in the order
in which the first of their parts would have come; what is left of the epoch in which they begin are those of which no
part has been read. Blocks that grow to the length that they have go on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

Permutation = Callable[[int, int, int], NDArray[np.int64]]  # of (number of blocks, seed, epoch)


@dataclass(frozen=True)
class BlockOrder:
    """The order of a text's blocks over the epochs of a run.

    Attributes:
        permutation: of the ``num_blocks`` blocks in an epoch, ``mixed_order`` or ``library_order``.
        per_epoch: the first of them are read, the rest is not.
        ratio: parts of a longer block.
        start: parts that have been read before the first longer one.
    """

    permutation: Permutation
    num_blocks: int
    seed: int
    per_epoch: int
    ratio: int = 1
    start: int = 0

    def at(self, number: int) -> int:
        """Which block comes after ``number`` others."""
        epoch, read = divmod(self.start, self.per_epoch)
        first = _epoch(self, epoch, read)
        if number < len(first):
            return int(first[number])
        later, place = divmod(number - len(first), min(self.per_epoch, self.num_blocks // self.ratio))
        return int(_epoch(self, epoch + 1 + later, 0)[place])

    def longer(self, ratio: int, start: int) -> BlockOrder:
        """That of blocks of ``ratio`` parts, once ``start`` parts have been read; ``at`` counts from there."""
        return replace(self, ratio=ratio, start=start)


@lru_cache(maxsize=4)
def _epoch(order: BlockOrder, epoch: int, read: int) -> NDArray[np.int64]:
    """The blocks of an epoch of which no part is among the ``read`` that came first."""
    place = np.argsort(order.permutation(order.num_blocks, order.seed, epoch))
    whole = order.num_blocks // order.ratio
    first = place[: whole * order.ratio].reshape(whole, order.ratio).min(1)
    blocks: NDArray[np.int64] = np.argsort(first)[: order.per_epoch]
    unread: NDArray[np.int64] = blocks[first[blocks] >= read]
    return unread


def mixed_order(num_blocks: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Of a text with samples in between."""
    return np.random.default_rng([seed, epoch, num_blocks]).permutation(num_blocks)


def library_order(num_blocks: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """As accelerate's ``SeedableRandomSampler`` shuffles a data set."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed + epoch))
    return np.asarray(order.numpy(), dtype=np.int64)
