"""Attention over a paged cache with torch operations alone, on any device: backend ``torch`` of ``decode_attention``.

Every page of the pool knows its owner, a (sequence, KV head). So the long-term part needs no loop over sequences or
heads and no gathering of keys: batched products of *all* pages, in place, with the queries of their owners, and sums
by owner. Pages go in chunks, so that intermediate results stay in the processor's caches; a running maximum per owner
makes the softmax exact (the same merge by log-sum-exp as everywhere, kernels/README.md).

N = B * Hkv owners, R rows of queries for each (G query heads times the tokens), M, L, A: running maximum, sum and
weighted values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spkv_kernels.pages import PagedState

_CHUNK = 16384  # rows of queries in a chunk of pages: 4,096 pages at G = 4
_QUERIES = 256  # tokens at a time in ``extend_attention``


def decode_attention(q: Tensor, cache: PagedState, scale: float) -> Tensor:
    """See ``spkv_kernels.decode_attention``."""
    batch, query_heads, size = q.shape
    rows = _owners(q, cache)
    slots = torch.arange(cache.window, device=q.device)
    filled = (slots < cache.seq_lens[:, None])[:, None, None]  # [B, 1, 1, w]
    ring_k, ring_v = (x.flatten(0, 1).to(rows.dtype) for x in (cache.ring_k, cache.ring_v))
    scores = torch.bmm(rows * scale, ring_k.mT).view(batch, cache.num_kv_heads, -1, cache.window)
    scores.masked_fill_(~filled, -torch.inf)
    state = _softmax_state(scores.flatten(0, 1), ring_v)
    return _finish(_add_pages(rows * scale, cache, *state)).view(batch, query_heads, size).to(q.dtype)


def extend_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, cache: PagedState, scale: float) -> Tensor:
    """See ``spkv_kernels.extend_attention``."""
    parts = [
        _extend(q[:, :, start : start + _QUERIES], start, k, v, keep, cache, scale)
        for start in range(0, q.shape[2], _QUERIES)
    ]
    return torch.cat(parts, 2)


def _extend(q: Tensor, start: int, k: Tensor, v: Tensor, keep: Tensor, cache: PagedState, scale: float) -> Tensor:
    """The queries from ``start`` of the new tokens: the ring and the new keys under a mask, then the pages."""
    batch, query_heads, number, size = q.shape
    heads, window, device = cache.num_kv_heads, cache.window, q.device
    stop = start + number
    rows = _owners(q, cache) * scale
    old = torch.arange(-window, 0, device=device)  # of the ring, counted from the first new token
    slot = ((cache.seq_lens[:, None] + old) % window)[:, None]  # [B, 1, w]
    row = slot[..., None].expand(-1, heads, -1, size)
    keys = torch.cat([cache.ring_k.gather(2, row), k[:, :, :stop]], 2).flatten(0, 1).to(rows.dtype)
    values = torch.cat([cache.ring_v.gather(2, row), v[:, :, :stop]], 2).flatten(0, 1).to(rows.dtype)
    kept = torch.cat([cache.ring_keep.gather(2, slot.expand(-1, heads, -1)), keep[:, :, :stop]], 2)
    key = torch.arange(-window, stop, device=device)
    age = torch.arange(start, stop, device=device)[:, None] - key
    exists = (key + cache.seq_lens[:, None] >= 0)[:, None, None]  # [B, 1, 1, w + stop]
    visible = (age >= 0) & exists & ((age < window) | kept[:, :, None])  # [B, Hkv, T, w + stop]
    scores = torch.bmm(rows, keys.mT).view(batch, heads, -1, number, window + stop)
    scores.masked_fill_(~visible[:, :, None], -torch.inf)
    state = _softmax_state(scores.flatten(2, 3).flatten(0, 1), values)
    out = _finish(_add_pages(rows, cache, *state))
    return out.view(batch, query_heads, number, size).to(q.dtype)


def _owners(q: Tensor, cache: PagedState) -> Tensor:
    """q [B, Hq, ..., D] as rows of their owners, [N, R, D], float32 (or wider)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.to(dtype).reshape(cache.batch_size * cache.num_kv_heads, -1, q.shape[-1])


def _softmax_state(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(M, L [N, R], A [N, R, D]) of scores [N, R, n] that hold each query's own key, so that M is finite."""
    largest = scores.amax(-1)
    p = torch.exp(scores - largest[..., None])
    return largest, p.sum(-1), torch.bmm(p, values)


def _add_pages(
    rows: Tensor, cache: PagedState, largest: Tensor, total: Tensor, acc: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add every page of the pool to its owner's M, L and A."""
    used = cache.num_pages
    filled = cache.lengths.flatten()[cache.page_owner.clamp(min=0)] - cache.page_block * cache.page_size
    filled = torch.where(cache.page_owner >= 0, filled, 0)
    places = torch.arange(cache.page_size, device=rows.device)
    step = max(1, _CHUNK // rows.shape[1])
    for start in range(0, used, step):
        some = slice(start, start + step)
        owner = cache.page_owner[some].clamp(min=0)
        mask = torch.zeros(len(owner), 1, cache.page_size, dtype=rows.dtype, device=rows.device)
        mask.masked_fill_((places >= filled[some, None])[:, None], -torch.inf)
        pool_k, pool_v = cache.pool_k[some].to(rows.dtype), cache.pool_v[some].to(rows.dtype)
        scores = torch.baddbmm(mask.expand(-1, rows.shape[1], -1), rows[owner], pool_k.mT)
        index = owner[:, None].expand(-1, rows.shape[1])
        new = largest.scatter_reduce(0, index, scores.amax(-1), "amax")
        p = torch.exp_(scores.sub_(new[owner][..., None]))
        shrink = torch.exp(largest - new)
        total = (total * shrink).index_add_(0, owner, p.sum(-1))
        acc = (acc * shrink[..., None]).index_add_(0, owner, torch.bmm(p, pool_v))
        largest = new
    return largest, total, acc


def _finish(state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    _, total, acc = state
    return acc / total[..., None]
