"""Token blocks as a model takes them: in batches, of which each process of torchrun runs its share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spkv_nas.base.distributed import num_connected, own_share
from spkv_nas.base.memory import AdaptiveBatchSize, Result
from spkv_nas.base.progress import Progress
from spkv_nas.data.blocks import TokenBlocks


def block_tokens(blocks: TokenBlocks, start: int, number: int, device: torch.device) -> Tensor:
    """int64 [at most ``number``, T] on ``device``: the blocks from ``start`` on."""
    return torch.from_numpy(blocks.tokens[start : start + number].astype(np.int64)).to(device)


def run_own_batches(
    run: Callable[[int, Tensor], Result],
    add: Callable[[int, Result], None],
    blocks: TokenBlocks,
    batch_size: int,
    device: torch.device,
    progress: Progress | None = None,
    *,
    divides: bool = True,
) -> None:
    """Run each batch of this process, and add what it gives.

    Shares are in the order of the text, process 0 has its beginning. Batches are those of a single process, so that the
    same blocks pass together and round alike, unless all processes are busy with smaller ones alone.

    Args:
        run: called with the number of the first block and int64 tokens [B, T] on ``device``; must leave nothing behind
            where it fails, as what a GPU has no memory for is run again in parts.
        add: called once for every block, with the number of the first and what ``run`` gave.
        batch_size: the most blocks of a batch.
        progress: called with (blocks done, in all) of this process, once a batch is done.
        divides: whether a batch may be run in parts, which other processes do not hear of.

    Warns:
        UserWarning: batches are run in parts.
    """
    size, share = _shared(blocks.num_blocks, batch_size)
    own = num_own_blocks(blocks.num_blocks, batch_size)
    first = share.start * size
    start, stop, together = first, first + own, AdaptiveBatchSize(size)
    while start < stop:

        def attempt(number: int, start: int = start) -> tuple[int, Result]:
            return number, run(start, block_tokens(blocks, start, number, device))

        there = min(size - start % size, stop - start)  # of the batch
        number, found = together.run(attempt, there) if divides else attempt(there)
        add(start, found)
        start += number
        if progress is not None:
            progress(start - first, own)


def num_own_blocks(num_blocks: int, batch_size: int) -> int:
    """How many of the blocks are in the batches that this process runs."""
    size, share = _shared(num_blocks, batch_size)
    return min(share.stop * size, num_blocks) - share.start * size if share else 0


def num_spare_batches(num_blocks: int, batch_size: int) -> int:
    """How many batches less this process runs than another."""
    size, share = _shared(num_blocks, batch_size)
    return math.ceil(math.ceil(num_blocks / size) / num_connected()) - len(share)


def _shared(num_blocks: int, batch_size: int) -> tuple[int, range]:
    """(blocks of a batch, which of the batches are this process's).

    With 24 blocks and batches of up to 8, two processes run two batches of 6 each.
    """
    most = math.ceil(num_blocks / num_connected())  # blocks of a process
    size = batch_size if num_connected() == 1 else math.ceil(most / max(1, math.ceil(most / batch_size)))
    size = max(1, size)
    return size, own_share(math.ceil(num_blocks / size))


def shuffled_batches(num_blocks: int, batch_size: int, steps: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Numbers of the blocks of every step; each block comes once before any comes again."""
    rng = np.random.default_rng(seed)
    queue = np.empty(0, dtype=np.int64)
    size = min(batch_size, num_blocks)
    for _ in range(steps):
        if len(queue) < size:
            queue = np.concatenate([queue, rng.permutation(num_blocks)])
        yield queue[:size]
        queue = queue[size:]
