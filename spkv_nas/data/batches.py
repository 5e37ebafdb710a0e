"""Feed token blocks to a model in batches, of which each process of torchrun runs its share."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from spkv_nas.base.distributed import num_connected, own_share
from spkv_nas.base.memory import AdaptiveBatchSize, Result
from spkv_nas.base.progress import Progress
from spkv_nas.data.blocks import TokenBlocks


def block_tokens(blocks: TokenBlocks, start: int, number: int, device: torch.device) -> torch.Tensor:
    """Return int64 [at most ``number``, T] on ``device``: the tokens of the blocks from ``start`` on."""
    return torch.from_numpy(blocks.tokens[start : start + number].astype(np.int64)).to(device)


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

    ``run`` gets the index of the first block and int64 tokens [B, T] on ``device``, of at most ``batch_size`` blocks.
    It must have no side effects if it fails: a batch that exceeds GPU memory is run again in parts, with a warning,
    unless other processes would have to know (``divides``). ``progress`` is called with (blocks done, in all) of this
    process.
    """
    # Determine this process's share of the batches
    size, share = _shared(blocks.num_blocks, batch_size)
    num_own = num_own_blocks(blocks.num_blocks, batch_size)
    # Run batch by batch, in parts where memory is too small
    first = share.start * size
    start, stop, batching = first, first + num_own, AdaptiveBatchSize(size)
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
    return min(share.stop * size, num_blocks) - share.start * size if share else 0


def num_spare_batches(num_blocks: int, batch_size: int) -> int:
    """Return the number of dummy batches that this process must run to stay in sync with the others."""
    size, share = _shared(num_blocks, batch_size)
    return math.ceil(math.ceil(num_blocks / size) / num_connected()) - len(share)


def _shared(num_blocks: int, batch_size: int) -> tuple[int, range]:
    """Return (blocks per batch, this process's batches): 24 blocks by 8 are two batches of 6 for two processes."""
    per_process = math.ceil(num_blocks / num_connected())
    size = batch_size if num_connected() == 1 else math.ceil(per_process / max(1, math.ceil(per_process / batch_size)))
    size = max(1, size)
    return size, own_share(math.ceil(num_blocks / size))


def shuffled_batches(num_blocks: int, batch_size: int, steps: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of each step's blocks; every block comes once before any comes again."""
    rng = np.random.default_rng(seed)
    queue = np.empty(0, dtype=np.int64)
    size = min(batch_size, num_blocks)
    for _ in range(steps):
        if len(queue) < size:
            queue = np.concatenate([queue, rng.permutation(num_blocks)])
        yield queue[:size]
        queue = queue[size:]
