"""Token blocks as a model takes them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spkv_nas.data.blocks import TokenBlocks


def block_tokens(blocks: TokenBlocks, start: int, number: int, device: torch.device) -> Tensor:
    """int64 [at most ``number``, T] on ``device``: the blocks from ``start`` on."""
    return torch.from_numpy(blocks.tokens[start : start + number].astype(np.int64)).to(device)
