"""Decoding kernels: one appends to the paged cache, two attend over it. Nothing here synchronises with the device.

An owner n is a (sequence, KV head). Its keys, first in the ring and then in pages, form tiles of BLOCK_N, and the tiles
of all owners form one line, which is cut into one share per program. Shares differ by one tile at most, so heads of
very different lengths cost in proportion to their keys. A program processes its share owner by owner and stores one
partial result for each, in slot program + owner, which only grows along the line and so is never shared. A second
kernel merges the partial results of an owner in the order of their programs.

The boundaries of shares follow from the lengths on the device: every program counts the tiles before its share itself,
so a captured CUDA graph stays balanced while the cache grows.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from spkv_kernels.pages import PagedState
from spkv_kernels.triton.common import LOG2E, cap_scores, load_rows, store_rows
from spkv_kernels.triton.config import default

_LOG2E = math.log2(math.e)
_PROGRAMS_PER_SM = 2
_PROGRAMS_INTERPRETED = 4
OWNERS = tl.constexpr(1024)  # number of owners whose tiles are counted at a time
RING = tl.constexpr(0)  # replaces the page size for keys in the ring


@triton.jit(do_not_specialize=["width"])
def cache_append_kernel(
    p_k, p_v, p_keep, p_ring_k, p_ring_v, p_ring_keep, p_pool_k, p_pool_v, p_table, p_lengths, p_seq_lens,
    stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh,
    heads, window, width,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Move the token that leaves the ring to a page if it was kept, and store the new one in its slot. Grid: B.

    k, v are [B, Hkv, D], keep [B, Hkv]; other tensors as in the cache. One program handles all heads of a sequence,
    because they share its length. A kept token without a page is lost, which NaN in its slot reports.
    """
    BLOCK_H: tl.constexpr = 2048 // BLOCK_D
    batch = tl.program_id(0).to(tl.int64)
    seen = tl.load(p_seq_lens + batch)
    slot = seen % window
    leaving = tl.where(seen >= window, heads, 0)  # heads whose slot holds a token
    o_d = tl.arange(0, BLOCK_D)
    for first in range(0, heads, BLOCK_H):
        # Read the leaving token of each head, if it was kept and has a page
        o_h = first + tl.arange(0, BLOCK_H)
        m_h = o_h < heads
        m_row = m_h[:, None] & (o_d < SIZE)[None, :]
        owner = batch * heads + o_h
        o_slot = owner * window + slot
        length = tl.load(p_lengths + owner, mask=m_h, other=0)
        kept = tl.load(p_ring_keep + o_slot, mask=o_h < leaving, other=0) != 0
        block = length // PAGE
        page = tl.load(p_table + owner * width + block, mask=kept & (block < width), other=-1)
        moves = page >= 0
        o_ring = o_slot[:, None] * SIZE + o_d[None, :]
        o_page = (page * PAGE + length % PAGE)[:, None] * SIZE + o_d[None, :]
        b_old_k = tl.load(p_ring_k + o_ring, mask=m_row & moves[:, None], other=0.0)
        b_old_v = tl.load(p_ring_v + o_ring, mask=m_row & moves[:, None], other=0.0)
        # Read the new token
        b_k = tl.load(
            p_k + batch * stride_kb + o_h[:, None] * stride_kh + o_d[None, :], mask=m_row, other=0.0
        )
        b_v = tl.load(
            p_v + batch * stride_vb + o_h[:, None] * stride_vh + o_d[None, :], mask=m_row, other=0.0
        )
        b_v = tl.where((kept & ~moves)[:, None], float("nan"), b_v)
        b_keep = tl.load(p_keep + batch * stride_gb + o_h * stride_gh, mask=m_h, other=0)
        tl.debug_barrier()  # threads now overwrite what others have read
        # Write both, and the lengths
        tl.store(p_pool_k + o_page, b_old_k, mask=m_row & moves[:, None])
        tl.store(p_pool_v + o_page, b_old_v, mask=m_row & moves[:, None])
        tl.store(p_ring_k + o_ring, b_k, mask=m_row)
        tl.store(p_ring_v + o_ring, b_v, mask=m_row)
        tl.store(p_ring_keep + o_slot, b_keep, mask=m_h)
        tl.store(p_lengths + owner, length + 1, mask=moves)
    tl.store(p_seq_lens + batch, seen + 1)


@triton.jit
def _num_keys(p_lengths, p_seq_lens, owner, mask, heads, window):
    """Return the number of keys of owners in the ring and in pages, int32."""
    seen = tl.load(p_seq_lens + owner // heads, mask=mask, other=0)
    length = tl.load(p_lengths + owner, mask=mask, other=0)
    return tl.minimum(seen, window).to(tl.int32), length.to(tl.int32)


@triton.jit
def _num_tiles(p_lengths, p_seq_lens, owner, mask, heads, window, BLOCK_N: tl.constexpr):
    """Return the number of tiles of owners, int32; a tile holds keys of either the ring or pages."""
    filled, length = _num_keys(p_lengths, p_seq_lens, owner, mask, heads, window)
    return tl.cdiv(filled, BLOCK_N) + tl.cdiv(length, BLOCK_N)


@triton.jit
def _tiles_before(p_lengths, p_seq_lens, stop, heads, window, BLOCK_N: tl.constexpr):
    """Count the tiles of all owners before ``stop``."""
    o_n = tl.arange(0, OWNERS)
    total = 0
    for first in range(0, stop, OWNERS):
        owner = first + o_n
        total += tl.sum(
            _num_tiles(p_lengths, p_seq_lens, owner, owner < stop, heads, window, BLOCK_N), 0
        )
    return total


@triton.jit
def _num_shares(programs, tiles):
    """Return the number of programs with a share; no share is empty."""
    return tl.maximum(tl.minimum(programs, tiles), 1)


@triton.jit
def _share_start(share, shares, tiles):
    """Return the first tile of a share; for ``share == shares`` the end of the line."""
    return (share.to(tl.int64) * tiles // shares).to(tl.int32)


@triton.jit
def _share_of(tile, shares, tiles):
    """Return the share that contains a tile, the inverse of ``_share_start``."""
    return (((tile + 1).to(tl.int64) * shares - 1) // tl.maximum(tiles, 1)).to(tl.int32)


@triton.jit
def _visit(
    acc, total, largest, b_q, p_k, p_v, p_table, low, high, stop, scale, softcap,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over tiles ``low`` to ``high - 1`` of an owner's ``stop`` keys in its ring or in pages."""
    o_d = tl.arange(0, BLOCK_D)
    # Paged keys need twice the stages to be prefetched as far, because the block table is loaded first
    for tile in tl.range(low, high, num_stages=STAGES if PAGE == RING else 2 * STAGES - 1):
        # Look up the rows of the keys
        o_s = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m_s = o_s < stop
        if PAGE == RING:
            o_row = o_s.to(tl.int64)
        else:
            o_row = tl.load(p_table + o_s // PAGE, mask=m_s, other=0) * PAGE + o_s % PAGE
        o_tile = o_row[:, None] * SIZE + o_d[None, :]
        m_tile = m_s[:, None] & (o_d < SIZE)[None, :]
        # Scores [BLOCK_M, BLOCK_N]
        b_k = tl.load(p_k + o_tile, mask=m_tile, other=0.0).to(b_q.dtype)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if softcap is not None:
            scores = cap_scores(scores, softcap)
        scores = tl.where(m_s[None, :], scores, -float("inf"))
        # Update the running softmax
        new_largest = tl.maximum(largest, tl.max(scores, 1))  # finite: every tile holds a key
        p = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(p, 1)
        b_v = tl.load(p_v + o_tile, mask=m_tile, other=0.0).to(b_q.dtype)
        acc = tl.dot(p.to(b_q.dtype), b_v, acc * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return acc, total, largest


@triton.jit(do_not_specialize=["owners", "width"])
def decode_fwd_kernel(
    p_q, p_ring_k, p_ring_v, p_pool_k, p_pool_v, p_table, p_lengths, p_seq_lens, p_part, p_lse,
    stride_qb, stride_qh,
    scale, softcap, owners, heads, window, width,
    GROUP: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute partial outputs [programs + owners, G, D] and their base-2 log-sum-exp [programs + owners, G], float32.

    Grid: any number of programs. Slots without a partial result stay unwritten. The G query heads of an owner are the
    rows of a tile of BLOCK_M. ``softcap``, in base 2, may be None.
    """
    # Find the tiles of the share
    program = tl.program_id(0)
    tiles = _tiles_before(p_lengths, p_seq_lens, owners, heads, window, BLOCK_N)
    shares = _num_shares(tl.num_programs(0), tiles)
    low = _share_start(tl.minimum(program, shares), shares, tiles)
    high = _share_start(tl.minimum(program + 1, shares), shares, tiles)
    # Find the owners of the share's first and last tiles, and the tiles before the former
    o_n = tl.arange(0, OWNERS)
    first = 0
    last = 0
    begin = 0
    before = 0
    for start in range(0, owners, OWNERS):
        owner = start + o_n
        owner_tiles = _num_tiles(
            p_lengths, p_seq_lens, owner, owner < owners, heads, window, BLOCK_N
        )
        ends = before + tl.cumsum(owner_tiles, 0)
        passed = (ends <= low) & (owner < owners)
        first += tl.sum(passed.to(tl.int32), 0)
        last += tl.sum(((ends < high) & (owner < owners)).to(tl.int32), 0)
        begin += tl.sum(tl.where(passed, owner_tiles, 0), 0)
        before += tl.sum(owner_tiles, 0)

    for owner in range(first, last + 1):
        # Find the tiles of this owner
        batch = (owner // heads).to(tl.int64)
        head = (owner % heads).to(tl.int64)
        filled, length = _num_keys(p_lengths, p_seq_lens, owner, owner < owners, heads, window)
        ring_tiles = tl.cdiv(filled, BLOCK_N)
        start_tile = tl.maximum(low - begin, 0)
        stop = tl.minimum(high - begin, ring_tiles + tl.cdiv(length, BLOCK_N))
        if start_tile < stop:
            # Attend over the ring, then over pages
            b_q = load_rows(
                p_q + batch * stride_qb,
                head * GROUP,
                stride_qh,
                (head + 1) * GROUP,
                SIZE,
                BLOCK_M,
                BLOCK_D,
                True,
            )
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
            o_owner = batch * heads + head
            o_ring = o_owner * window * SIZE
            acc, total, largest = _visit(
                acc, total, largest, b_q, p_ring_k + o_ring, p_ring_v + o_ring, p_table,
                start_tile, tl.minimum(stop, ring_tiles), filled, scale, softcap, RING, SIZE, BLOCK_N, BLOCK_D, STAGES,
            )  # fmt: skip
            acc, total, largest = _visit(
                acc, total, largest, b_q, p_pool_k, p_pool_v, p_table + o_owner * width,
                tl.maximum(start_tile - ring_tiles, 0), stop - ring_tiles, length,
                scale, softcap, PAGE, SIZE, BLOCK_N, BLOCK_D, STAGES,
            )  # fmt: skip
            # Store the partial result
            row = (program + owner).to(tl.int64) * GROUP
            store_rows(p_part, row, SIZE, row + GROUP, acc / total[:, None], SIZE, BLOCK_M, BLOCK_D)
            o_m = tl.arange(0, BLOCK_M)
            tl.store(p_lse + row + o_m, largest + tl.log2(total), mask=o_m < GROUP)
        begin += ring_tiles + tl.cdiv(length, BLOCK_N)


@triton.jit(do_not_specialize=["owners", "programs"])
def decode_combine_kernel(
    p_part, p_lse, p_sink_logits, p_lengths, p_seq_lens, p_out,
    owners, heads, window, programs,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge partial outputs to out [B * Hq, D], which is zero for an empty sequence. Grid: B * Hq.

    ``sink_logits`` float32 [Hq] may be None.
    """
    PARTS: tl.constexpr = 2048 // BLOCK_D
    row = tl.program_id(0)
    owner = row // GROUP
    # Find the shares of the owner
    tiles = _tiles_before(p_lengths, p_seq_lens, owners, heads, window, BLOCK_N)
    begin = _tiles_before(p_lengths, p_seq_lens, owner, heads, window, BLOCK_N)
    end = begin + _num_tiles(p_lengths, p_seq_lens, owner, owner < owners, heads, window, BLOCK_N)
    shares = _num_shares(programs, tiles)
    stop = tl.where(begin < end, _share_of(end - 1, shares, tiles) + 1, 0)
    o_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    largest = -float("inf")
    if p_sink_logits is not None:  # a learned sink of -inf vanishes with the first part
        total = 1.0
        largest = tl.load(p_sink_logits + row % (heads * GROUP)) * LOG2E
    for first in range(_share_of(begin, shares, tiles), stop, PARTS):
        # Load partial results of some shares
        o_p = first + tl.arange(0, PARTS)
        m_p = o_p < stop
        o_part = (o_p + owner).to(tl.int64) * GROUP + row % GROUP
        lse = tl.load(p_lse + o_part, mask=m_p, other=-float("inf"))
        b_part = tl.load(
            p_part + o_part[:, None] * SIZE + o_d[None, :],
            mask=m_p[:, None] & (o_d < SIZE)[None, :],
            other=0.0,
        )
        # Merge them by log-sum-exp
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        weight = tl.exp2(lse - new_largest)
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * b_part, 0)
        largest = new_largest
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(p_out + row.to(tl.int64) * SIZE + o_d, acc.to(p_out.dtype.element_ty), mask=o_d < SIZE)


def append(cache: PagedState, k: Tensor, v: Tensor, keep: Tensor) -> None:
    """Append tokens as ``PagedKVCache.append``, whose pages must be allocated."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    size = cache.head_dim
    cache_append_kernel[(cache.batch_size,)](
        k, v, keep.view(torch.uint8), cache.ring_k, cache.ring_v, cache.ring_keep.view(torch.uint8),
        cache.pool_k, cache.pool_v, cache.block_table, cache.lengths, cache.seq_lens,
        *k.stride()[:2], *v.stride()[:2], *keep.stride(),
        cache.num_kv_heads, cache.window, cache.block_table.shape[2],
        PAGE=cache.page_size, SIZE=size, BLOCK_D=max(16, triton.next_power_of_2(size)),
    )  # fmt: skip


def decode_attention(
    q: Tensor, cache: PagedState, scale: float, sink_logits: Tensor | None, softcap: float | None
) -> Tensor:
    """Compute ``spkv_kernels.decode_attention``."""
    batch, query_heads, size = q.shape
    heads = cache.num_kv_heads
    owners, group = batch * heads, query_heads // heads
    queries = q.to(torch.promote_types(q.dtype, cache.pool_k.dtype)).contiguous()
    # Choose the launch
    block_d = max(16, triton.next_power_of_2(size))
    config = default("decode", size, queries.dtype)
    block_m = max(config.block_m, triton.next_power_of_2(group))
    programs = _num_programs(q.device)
    # Run both kernels
    part = torch.empty(programs + owners, group, size, dtype=torch.float32, device=q.device)
    lse = torch.empty(programs + owners, group, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decode_fwd_kernel[(programs,)](
        queries, cache.ring_k, cache.ring_v, cache.pool_k, cache.pool_v, cache.block_table,
        cache.lengths, cache.seq_lens, part, lse,
        *queries.stride()[:2], scale * _LOG2E, None if softcap is None else softcap * _LOG2E,
        owners, heads, cache.window, cache.block_table.shape[2],
        GROUP=group, PAGE=cache.page_size, SIZE=size,
        **{**config.options(), "BLOCK_M": block_m}, BLOCK_D=block_d, STAGES=config.num_stages,
    )  # fmt: skip
    decode_combine_kernel[(batch * query_heads,)](
        part, lse, sink_logits, cache.lengths, cache.seq_lens, out, owners, heads, cache.window, programs,
        GROUP=group, SIZE=size, BLOCK_N=config.block_n, BLOCK_D=block_d,
    )  # fmt: skip
    return out


@functools.lru_cache
def _num_programs(device: torch.device) -> int:
    """Return the number of programs that the device runs at once; a few in the interpreter."""
    if device.type != "cuda":
        return _PROGRAMS_INTERPRETED
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
