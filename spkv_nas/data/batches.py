"""Feed token blocks to a model in batches, of which each process of torchrun runs its share, and order those of a run.

A training run's blocks are chosen by pure functions of seed and position: text or synthetic, and which block of text.
They are counted from 0 over all steps and all processes, so that every branch gets the same ones, and so does a run
that resumes. Synthetic blocks are spread evenly: any stretch contains their share, to within one block.

An epoch contains each block once, in its own order. Longer blocks consist of neighbouring ones, and come in the order
in which the first of their parts would have come; what remains of the epoch in which they begin are those with no part
read so far. Blocks that "grow" to their current length continue unchanged.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from spkv_nas.base.distributed import num_connected, own_share
from spkv_nas.base.memory import AdaptiveBatchSize, Result
from spkv_nas.base.progress import Progress
from spkv_nas.data.blocks import TokenBlocks

# (number of blocks, seed, epoch) -> block indices
Permutation = Callable[[int, int, int], NDArray[np.int64]]


def block_tokens(
    blocks: TokenBlocks, start: int, number: int, device: torch.device
) -> torch.Tensor:
    """Return int64 [at most ``number``, T] on ``device``: the tokens of the blocks from ``start`` on.

    They are marked (``TokenBlocks.marked``): ``blocks.boundaries.inputs`` makes of them what a model takes.
    """
    marked = blocks.marked(slice(start, start + number))
    return torch.from_numpy(marked.astype(np.int64)).to(device)


def run_own_batches(
    run: Callable[[int, torch.Tensor], Result],
    add: Callable[[int, Result], None],
    blocks: TokenBlocks,
    batch_size: int,
    device: torch.device,
    progress: Progress | None = None,
    *,
    divides: bool = True,
) -> None:
    """Run each batch of this process, and pass on the result of ``run`` to ``add``, with the index of the first block.

    Shares are in text order, and rank 0 has the beginning. Batches are those of a single process, so that the same
    blocks share a batch and round alike, unless there are too few to keep all processes busy; then they are smaller.

    ``run`` gets the index of the first block and ``block_tokens`` of at most ``batch_size`` blocks on ``device``.
    It must have no side effects if it fails: a batch that exceeds GPU memory is run again in parts, with a warning,
    unless other processes would have to know (``divides``). ``progress`` is called with (blocks done, in all) of this
    process.
    """
    # Determine this process's share of the batches
    size, share = _shared(blocks.num_blocks, batch_size)
    num_own = num_own_blocks(blocks.num_blocks, batch_size)
    # Run batch by batch, in parts where memory is too small
    first = share.start * size
    start = first
    stop = first + num_own
    batching = AdaptiveBatchSize(size)
    while start < stop:

        def attempt(number: int, start: int = start) -> tuple[int, Result]:
            return number, run(start, block_tokens(blocks, start, number, device))

        num_left = min(size - start % size, stop - start)  # blocks left in the current batch
        number, result = batching.run(attempt, num_left) if divides else attempt(num_left)
        add(start, result)
        start += number
        if progress is not None:
            progress(start - first, num_own)


def num_own_blocks(num_blocks: int, batch_size: int) -> int:
    """Return the number of blocks in the batches that this process runs."""
    size, share = _shared(num_blocks, batch_size)
    if not share:
        return 0
    return min(share.stop * size, num_blocks) - share.start * size


def num_spare_batches(num_blocks: int, batch_size: int) -> int:
    """Return the number of dummy batches that this process must run to stay in sync with the others."""
    size, share = _shared(num_blocks, batch_size)
    num_batches = math.ceil(num_blocks / size)
    return math.ceil(num_batches / num_connected()) - len(share)


def _shared(num_blocks: int, batch_size: int) -> tuple[int, range]:
    """Return (blocks per batch, this process's batches): 24 blocks by 8 are two batches of 6 for two processes."""
    size = batch_size
    if num_connected() > 1:
        per_process = math.ceil(num_blocks / num_connected())
        num_batches = max(1, math.ceil(per_process / batch_size))
        size = math.ceil(per_process / num_batches)
    size = max(1, size)
    return size, own_share(math.ceil(num_blocks / size))


def shuffled_batches(
    num_blocks: int, batch_size: int, steps: int, seed: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of each step's blocks; every block comes once before any comes again."""
    rng = np.random.default_rng(seed)
    queue = np.empty(0, dtype=np.int64)
    size = min(batch_size, num_blocks)
    for _ in range(steps):
        if len(queue) < size:
            queue = np.concatenate([queue, rng.permutation(num_blocks)])
        yield queue[:size]
        queue = queue[size:]


@dataclass(frozen=True)
class BlockOrder:
    """Order of a text's blocks over the epochs of a run."""

    # Order of the ``num_blocks`` blocks in an epoch, ``mixed_order`` or ``library_order``
    permutation: Permutation
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
        per_epoch = min(self.per_epoch, self.num_blocks // self.ratio)
        later, position = divmod(number - len(first), per_epoch)
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
