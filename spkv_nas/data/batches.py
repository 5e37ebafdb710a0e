"""Token blocks as a model takes them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spkv_nas.data.blocks import TokenBlocks


def block_tokens(blocks: TokenBlocks, start: int, number: int, device: torch.device) -> Tensor:
    """int64 [at most ``number``, T] on ``device``: the blocks from ``start`` on."""
    return torch.from_numpy(blocks.tokens[start : start + number].astype(np.int64)).to(device)


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
