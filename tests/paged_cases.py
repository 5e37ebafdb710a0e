"""Paged caches with tokens in them, for the tests of decoding and appending."""

from __future__ import annotations

import torch
from spkv_kernels import PagedKVCache
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DENSITIES = (0.0, 0.3, 1.0)  # of the heads: a local one, one that its gate prunes, a global one


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def used_pages(cache: PagedKVCache) -> int:
    """Return the number of pages that belong to a head, including reserved ones."""
    return int((cache.page_owner >= 0).sum())


def filled_cache(
    lengths: list[int],
    size: int,
    densities: tuple[float, ...] = DENSITIES,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    **options: int,
) -> PagedKVCache:
    """Make a cache with sequences of ``lengths`` tokens and one head per density."""
    batch, heads = len(lengths), len(densities)
    cache = PagedKVCache(
        batch, heads, size, **{"window": 20, **options}, dtype=dtype, device=device
    )
    k, v = (
        normal(batch, heads, max(lengths), size, seed=seed, dtype=dtype).to(device)
        for seed in (1, 2)
    )
    chance = torch.rand(batch, heads, max(lengths), generator=torch.Generator().manual_seed(3)).to(
        device
    )
    keep = chance < torch.tensor(densities, device=device)[:, None]
    cache.prefill(k, v, keep, torch.tensor(lengths, device=device))
    return cache
