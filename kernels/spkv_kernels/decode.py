"""Attention over a paged cache with torch operations, on any device: backend ``torch`` of ``decode_attention``.

Every page of the pool records its owner, a (sequence, KV head). So the long-term part needs no loop over sequences or
heads and no gathering of keys: batched products of *all* pages, in place, with the queries of their owners, and sums
by owner. Pages are processed in chunks, so that intermediate results stay in the CPU caches; a running maximum per
owner makes the softmax exact (merging by log-sum-exp, as everywhere; see kernels/README.md).

There are N = B * Hkv owners with R rows of queries each (G query heads times the tokens). M, L, A are the running
maximum, sum and weighted values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spkv_kernels.pages import PagedState

_CHUNK = 16384  # query rows per chunk of pages: 4,096 pages at G = 4
_QUERIES = 256  # tokens per step of ``extend_attention``


def decode_attention(
    q: Tensor, cache: PagedState, scale: float, sink_logits: Tensor | None, softcap: float | None
) -> Tensor:
    """Compute ``spkv_kernels.decode_attention``."""
    batch, query_heads, size = q.shape
    # Attend over the ring
    rows = _owners(q, cache)
    slots = torch.arange(cache.window, device=q.device)
    filled = (slots < cache.seq_lens[:, None])[:, None, None]  # [B, 1, 1, w]
    ring_k, ring_v = (x.flatten(0, 1).to(rows.dtype) for x in (cache.ring_k, cache.ring_v))
    scores = _scores(rows * scale, ring_k, softcap).view(
        batch, cache.num_kv_heads, -1, cache.window
    )
    scores.masked_fill_(~filled, -torch.inf)
    state = _softmax_state(scores.flatten(0, 1), ring_v)
    # Add the pages
    out = _finish(_add_pages(rows * scale, cache, softcap, *state), cache, sink_logits)
    return out.view(batch, query_heads, size).to(q.dtype)


def extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    cache: PagedState,
    scale: float,
    sink_logits: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Compute ``spkv_kernels.extend_attention``, ``_QUERIES`` tokens at a time."""
    parts = [
        _extend(
            q[:, :, start : start + _QUERIES], start, k, v, keep, cache, scale, sink_logits, softcap
        )
        for start in range(0, q.shape[2], _QUERIES)
    ]
    return torch.cat(parts, 2)


def _extend(
    q: Tensor,
    start: int,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    cache: PagedState,
    scale: float,
    sink_logits: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attend from new tokens at ``start`` over ring and new keys under a mask, then over pages."""
    batch, query_heads, num_tokens, size = q.shape
    heads, window, device = cache.num_kv_heads, cache.window, q.device
    stop = start + num_tokens
    # Gather the ring, and append the new keys: [N, w + stop, D]
    rows = _owners(q, cache) * scale
    # Position relative to the first new token
    ring_offset = torch.arange(-window, 0, device=device)
    slot = ((cache.seq_lens[:, None] + ring_offset) % window)[:, None]  # [B, 1, w]
    row = slot[..., None].expand(-1, heads, -1, size)
    keys = torch.cat([cache.ring_k.gather(2, row), k[:, :, :stop]], 2).flatten(0, 1).to(rows.dtype)
    values = (
        torch.cat([cache.ring_v.gather(2, row), v[:, :, :stop]], 2).flatten(0, 1).to(rows.dtype)
    )
    kept = torch.cat([cache.ring_keep.gather(2, slot.expand(-1, heads, -1)), keep[:, :, :stop]], 2)
    # Mask the future, and keys outside the window that were not kept
    key = torch.arange(-window, stop, device=device)
    age = torch.arange(start, stop, device=device)[:, None] - key
    exists = (key + cache.seq_lens[:, None] >= 0)[:, None, None]  # [B, 1, 1, w + stop]
    visible = (age >= 0) & exists & ((age < window) | kept[:, :, None])  # [B, Hkv, T, w + stop]
    # Attend over both, then add the pages
    scores = _scores(rows, keys, softcap).view(batch, heads, -1, num_tokens, window + stop)
    scores.masked_fill_(~visible[:, :, None], -torch.inf)
    state = _softmax_state(scores.flatten(2, 3).flatten(0, 1), values)
    out = _finish(_add_pages(rows, cache, softcap, *state), cache, sink_logits)
    return out.view(batch, query_heads, num_tokens, size).to(q.dtype)


def _owners(q: Tensor, cache: PagedState) -> Tensor:
    """Reshape q [B, Hq, ..., D] to rows by owner [N, R, D], in float32 or wider."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.to(dtype).reshape(cache.batch_size * cache.num_kv_heads, -1, q.shape[-1])


def _scores(rows: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
    """Compute scores [N, R, n] of scaled queries [N, R, D] with keys [N, n, D], soft-capped if there is a cap."""
    scores = torch.bmm(rows, keys.mT)
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _softmax_state(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute M, L [N, R] and A [N, R, D] of scores [N, R, n] that include each query's own key, so M is finite."""
    largest = scores.amax(-1)
    p = torch.exp(scores - largest[..., None])
    return largest, p.sum(-1), torch.bmm(p, values)


def _add_pages(
    rows: Tensor,
    cache: PagedState,
    softcap: float | None,
    largest: Tensor,
    total: Tensor,
    acc: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add every page of the pool to its owner's M, L and A."""
    num_pages = cache.num_pages
    # Count the entries of each page
    filled = (
        cache.lengths.flatten()[cache.page_owner.clamp(min=0)] - cache.page_block * cache.page_size
    )
    filled = torch.where(cache.page_owner >= 0, filled, 0)
    offsets = torch.arange(cache.page_size, device=rows.device)
    step = max(1, _CHUNK // rows.shape[1])
    for start in range(0, num_pages, step):
        chunk = slice(start, start + step)
        # Score a chunk of pages with the queries of their owners: [chunk, R, page_size]
        owner = cache.page_owner[chunk].clamp(min=0)
        pool_k, pool_v = cache.pool_k[chunk].to(rows.dtype), cache.pool_v[chunk].to(rows.dtype)
        scores = _scores(rows[owner], pool_k, softcap)
        scores.masked_fill_((offsets >= filled[chunk, None])[:, None], -torch.inf)
        # Update the running softmax by owner
        index = owner[:, None].expand(-1, rows.shape[1])
        new_largest = largest.scatter_reduce(0, index, scores.amax(-1), "amax")
        p = torch.exp_(scores.sub_(new_largest[owner][..., None]))
        shrink = torch.exp(largest - new_largest)
        total = (total * shrink).index_add_(0, owner, p.sum(-1))
        acc = (acc * shrink[..., None]).index_add_(0, owner, torch.bmm(p, pool_v))
        largest = new_largest
    return largest, total, acc


def _finish(
    state: tuple[Tensor, Tensor, Tensor], cache: PagedState, sink_logits: Tensor | None
) -> Tensor:
    """Return A / (L + exp(sink - M)), the attention output [N, R, D]."""
    largest, total, acc = state
    if sink_logits is not None:
        # The logit of each row, whose queries are ordered by head, then token: [Hq] -> [N, R]
        heads = cache.num_kv_heads
        by_head = sink_logits.repeat_interleave(heads * largest.shape[1] // len(sink_logits)).view(
            heads, -1
        )
        rows = by_head.to(largest.dtype).repeat(cache.batch_size, 1)
        # exp(sink - M) may overflow: rescale to the larger of both
        new_largest = torch.maximum(largest, rows)
        shrink = torch.exp(largest - new_largest)
        total, acc = total * shrink + torch.exp(rows - new_largest), acc * shrink[..., None]
    return acc / total[..., None]
