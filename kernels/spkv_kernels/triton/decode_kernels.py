"""Decoding: one kernel appends to the paged cache, two attend over it. Nothing here waits for the device.

An owner n is a (sequence, KV head). Its keys, the ring's and then the pages', make tiles of BLOCK_N, and all tiles of
all owners one line, which is cut into shares that differ by one tile at most, one per program: heads of very different
lengths cost what they hold. A program walks its share owner by owner and leaves one part for each, in slot program +
owner, which only grows along the line and so is never shared. A second kernel merges the parts of an owner in the order
of their programs.

Where the shares lie follows from the lengths on the device: every program counts the tiles before its own by itself, so
a captured CUDA graph stays balanced while the cache grows.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from spkv_kernels.pages import PagedState
from spkv_kernels.triton.common import load_rows, store_rows
from spkv_kernels.triton.config import default

_LOG2E = math.log2(math.e)
_PROGRAMS_PER_SM = 2
_PROGRAMS_INTERPRETED = 4
OWNERS = tl.constexpr(1024)  # owners whose tiles are counted at a time
RING = tl.constexpr(0)  # stands in place of the page size where keys lie in the ring


@triton.jit(do_not_specialize=["width"])
def cache_append_kernel(
    p_k, p_v, p_keep, p_ring_k, p_ring_v, p_ring_keep, p_pool_k, p_pool_v, p_table, p_lengths, p_seq_lens,
    stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh,
    heads, window, width,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The token that leaves the ring goes to a page if it was kept, the new one takes its slot. Grid: B.

    k, v [B, Hkv, D], keep [B, Hkv]; the rest lies as in the cache. One program has all heads of a sequence, because
    they share its length. A kept token without a page is lost: NaN in its slot tells.
    """
    BLOCK_H: tl.constexpr = 2048 // BLOCK_D
    batch = tl.program_id(0).to(tl.int64)
    seen = tl.load(p_seq_lens + batch)
    slot = seen % window
    leaving = tl.where(seen >= window, heads, 0)  # heads whose slot holds a token
    o_d = tl.arange(0, BLOCK_D)
    for first in range(0, heads, BLOCK_H):
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
        b_k = tl.load(p_k + batch * stride_kb + o_h[:, None] * stride_kh + o_d[None, :], mask=m_row, other=0.0)
        b_v = tl.load(p_v + batch * stride_vb + o_h[:, None] * stride_vh + o_d[None, :], mask=m_row, other=0.0)
        b_v = tl.where((kept & ~moves)[:, None], float("nan"), b_v)
        b_keep = tl.load(p_keep + batch * stride_gb + o_h * stride_gh, mask=m_h, other=0)
        tl.debug_barrier()  # all threads have read what others write now
        tl.store(p_pool_k + o_page, b_old_k, mask=m_row & moves[:, None])
        tl.store(p_pool_v + o_page, b_old_v, mask=m_row & moves[:, None])
        tl.store(p_ring_k + o_ring, b_k, mask=m_row)
        tl.store(p_ring_v + o_ring, b_v, mask=m_row)
        tl.store(p_ring_keep + o_slot, b_keep, mask=m_h)
        tl.store(p_lengths + owner, length + 1, mask=moves)
    tl.store(p_seq_lens + batch, seen + 1)


@triton.jit
def _num_keys(p_lengths, p_seq_lens, owner, mask, heads, window):
    """(keys in the ring, keys in pages) of owners, int32."""
    seen = tl.load(p_seq_lens + owner // heads, mask=mask, other=0)
    length = tl.load(p_lengths + owner, mask=mask, other=0)
    return tl.minimum(seen, window).to(tl.int32), length.to(tl.int32)


@triton.jit
def _num_tiles(p_lengths, p_seq_lens, owner, mask, heads, window, BLOCK_N: tl.constexpr):
    """Tiles of owners, int32: a tile holds keys of the ring or keys of pages."""
    filled, length = _num_keys(p_lengths, p_seq_lens, owner, mask, heads, window)
    return tl.cdiv(filled, BLOCK_N) + tl.cdiv(length, BLOCK_N)


@triton.jit
def _tiles_before(p_lengths, p_seq_lens, stop, heads, window, BLOCK_N: tl.constexpr):
    """Tiles of all owners before ``stop``."""
    o_n = tl.arange(0, OWNERS)
    total = 0
    for first in range(0, stop, OWNERS):
        owner = first + o_n
        total += tl.sum(_num_tiles(p_lengths, p_seq_lens, owner, owner < stop, heads, window, BLOCK_N), 0)
    return total


@triton.jit
def _num_shares(programs, tiles):
    """Programs that have a share: no share is empty."""
    return tl.maximum(tl.minimum(programs, tiles), 1)


@triton.jit
def _share_start(share, shares, tiles):
    """The first tile of a share; that of share ``shares`` is the end of the line."""
    return (share.to(tl.int64) * tiles // shares).to(tl.int32)


@triton.jit
def _share_of(tile, shares, tiles):
    """The share that holds a tile: the inverse of ``_share_start``."""
    return (((tile + 1).to(tl.int64) * shares - 1) // tl.maximum(tiles, 1)).to(tl.int32)


@triton.jit
def _visit(
    acc, total, largest, b_q, p_k, p_v, p_table, low, high, stop, scale,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over tiles ``low`` to ``high - 1`` of an owner's ``stop`` keys: in its ring, or in pages."""
    o_d = tl.arange(0, BLOCK_D)
    # Keys that are looked up in the table take twice the stages to be loaded as far ahead.
    for tile in tl.range(low, high, num_stages=STAGES if PAGE == RING else 2 * STAGES - 1):
        o_s = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m_s = o_s < stop
        if PAGE == RING:
            o_row = o_s.to(tl.int64)
        else:
            o_row = tl.load(p_table + o_s // PAGE, mask=m_s, other=0) * PAGE + o_s % PAGE
        o_tile = o_row[:, None] * SIZE + o_d[None, :]
        m_tile = m_s[:, None] & (o_d < SIZE)[None, :]
        b_k = tl.load(p_k + o_tile, mask=m_tile, other=0.0).to(b_q.dtype)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        scores = tl.where(m_s[None, :], scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 1))  # finite: every tile holds a key
        p = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(p, 1)
        b_v = tl.load(p_v + o_tile, mask=m_tile, other=0.0).to(b_q.dtype)
        acc = tl.dot(p.to(b_q.dtype), b_v, acc * shrink[:, None], input_precision="ieee")
        largest = new
    return acc, total, largest


@triton.jit(do_not_specialize=["owners", "width"])
def decode_fwd_kernel(
    p_q, p_ring_k, p_ring_v, p_pool_k, p_pool_v, p_table, p_lengths, p_seq_lens, p_part, p_lse,
    stride_qb, stride_qh,
    scale, owners, heads, window, width,
    GROUP: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """part [programs + owners, G, D] and its base-2 log-sum-exp [programs + owners, G], float32. Grid: any number.

    Slots that no part falls on stay unwritten. The G query heads of an owner are the rows of a tile of BLOCK_M.
    """
    program = tl.program_id(0)
    tiles = _tiles_before(p_lengths, p_seq_lens, owners, heads, window, BLOCK_N)
    shares = _num_shares(tl.num_programs(0), tiles)
    low = _share_start(tl.minimum(program, shares), shares, tiles)
    high = _share_start(tl.minimum(program + 1, shares), shares, tiles)
    # Count the owners that end before the share's first tile and before its last one, and the tiles of the former.
    o_n = tl.arange(0, OWNERS)
    first = 0
    last = 0
    begin = 0
    before = 0
    for start in range(0, owners, OWNERS):
        owner = start + o_n
        mine = _num_tiles(p_lengths, p_seq_lens, owner, owner < owners, heads, window, BLOCK_N)
        ends = before + tl.cumsum(mine, 0)
        passed = (ends <= low) & (owner < owners)
        first += tl.sum(passed.to(tl.int32), 0)
        last += tl.sum(((ends < high) & (owner < owners)).to(tl.int32), 0)
        begin += tl.sum(tl.where(passed, mine, 0), 0)
        before += tl.sum(mine, 0)

    for owner in range(first, last + 1):
        batch = (owner // heads).to(tl.int64)
        head = (owner % heads).to(tl.int64)
        filled, length = _num_keys(p_lengths, p_seq_lens, owner, owner < owners, heads, window)
        ring = tl.cdiv(filled, BLOCK_N)
        here = tl.maximum(low - begin, 0)
        stop = tl.minimum(high - begin, ring + tl.cdiv(length, BLOCK_N))
        if here < stop:
            b_q = load_rows(
                p_q + batch * stride_qb, head * GROUP, stride_qh, (head + 1) * GROUP, SIZE, BLOCK_M, BLOCK_D, True
            )
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
            o_owner = batch * heads + head
            o_ring = o_owner * window * SIZE
            acc, total, largest = _visit(
                acc, total, largest, b_q, p_ring_k + o_ring, p_ring_v + o_ring, p_table,
                here, tl.minimum(stop, ring), filled, scale, RING, SIZE, BLOCK_N, BLOCK_D, STAGES,
            )  # fmt: skip
            acc, total, largest = _visit(
                acc, total, largest, b_q, p_pool_k, p_pool_v, p_table + o_owner * width,
                tl.maximum(here - ring, 0), stop - ring, length, scale, PAGE, SIZE, BLOCK_N, BLOCK_D, STAGES,
            )  # fmt: skip
            row = (program + owner).to(tl.int64) * GROUP
            store_rows(p_part, row, SIZE, row + GROUP, acc / total[:, None], SIZE, BLOCK_M, BLOCK_D)
            o_m = tl.arange(0, BLOCK_M)
            tl.store(p_lse + row + o_m, largest + tl.log2(total), mask=o_m < GROUP)
        begin += ring + tl.cdiv(length, BLOCK_N)


@triton.jit(do_not_specialize=["owners", "programs"])
def decode_combine_kernel(
    p_part, p_lse, p_lengths, p_seq_lens, p_out,
    owners, heads, window, programs,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [B * Hq, D] from the parts, zero for an empty sequence. Grid: B * Hq."""
    PARTS: tl.constexpr = 2048 // BLOCK_D
    row = tl.program_id(0)
    owner = row // GROUP
    tiles = _tiles_before(p_lengths, p_seq_lens, owners, heads, window, BLOCK_N)
    begin = _tiles_before(p_lengths, p_seq_lens, owner, heads, window, BLOCK_N)
    end = begin + _num_tiles(p_lengths, p_seq_lens, owner, owner < owners, heads, window, BLOCK_N)
    shares = _num_shares(programs, tiles)
    stop = tl.where(begin < end, _share_of(end - 1, shares, tiles) + 1, 0)
    o_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    largest = -float("inf")
    for first in range(_share_of(begin, shares, tiles), stop, PARTS):
        o_p = first + tl.arange(0, PARTS)
        m_p = o_p < stop
        o_part = (o_p + owner).to(tl.int64) * GROUP + row % GROUP
        lse = tl.load(p_lse + o_part, mask=m_p, other=-float("inf"))
        b_part = tl.load(
            p_part + o_part[:, None] * SIZE + o_d[None, :], mask=m_p[:, None] & (o_d < SIZE)[None, :], other=0.0
        )
        new = tl.maximum(largest, tl.max(lse, 0))
        weight = tl.exp2(lse - new)
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * b_part, 0)
        largest = new
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(p_out + row.to(tl.int64) * SIZE + o_d, acc.to(p_out.dtype.element_ty), mask=o_d < SIZE)


def append(cache: PagedState, k: Tensor, v: Tensor, keep: Tensor) -> None:
    """``PagedKVCache.append``, whose pages are there."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    size = cache.head_dim
    cache_append_kernel[(cache.batch_size,)](
        k, v, keep.view(torch.uint8), cache.ring_k, cache.ring_v, cache.ring_keep.view(torch.uint8),
        cache.pool_k, cache.pool_v, cache.block_table, cache.lengths, cache.seq_lens,
        *k.stride()[:2], *v.stride()[:2], *keep.stride(),
        cache.num_kv_heads, cache.window, cache.block_table.shape[2],
        PAGE=cache.page_size, SIZE=size, BLOCK_D=max(16, triton.next_power_of_2(size)),
    )  # fmt: skip


def decode_attention(q: Tensor, cache: PagedState, scale: float) -> Tensor:
    """See ``spkv_kernels.decode_attention``."""
    batch, query_heads, size = q.shape
    heads = cache.num_kv_heads
    owners, group = batch * heads, query_heads // heads
    queries = q.to(torch.promote_types(q.dtype, cache.pool_k.dtype)).contiguous()
    block_d = max(16, triton.next_power_of_2(size))
    config = default("decode", size, queries.dtype)
    block_m = max(config.block_m, triton.next_power_of_2(group))
    programs = _num_programs(q.device)
    part = torch.empty(programs + owners, group, size, dtype=torch.float32, device=q.device)
    lse = torch.empty(programs + owners, group, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decode_fwd_kernel[(programs,)](
        queries, cache.ring_k, cache.ring_v, cache.pool_k, cache.pool_v, cache.block_table,
        cache.lengths, cache.seq_lens, part, lse,
        *queries.stride()[:2], scale * _LOG2E, owners, heads, cache.window, cache.block_table.shape[2],
        GROUP=group, PAGE=cache.page_size, SIZE=size,
        **{**config.options(), "BLOCK_M": block_m}, BLOCK_D=block_d, STAGES=config.num_stages,
    )  # fmt: skip
    decode_combine_kernel[(batch * query_heads,)](
        part, lse, cache.lengths, cache.seq_lens, out, owners, heads, cache.window, programs,
        GROUP=group, SIZE=size, BLOCK_N=config.block_n, BLOCK_D=block_d,
    )  # fmt: skip
    return out


@functools.lru_cache
def _num_programs(device: torch.device) -> int:
    """As many as the device runs at once; in the interpreter a few."""
    if device.type != "cuda":
        return _PROGRAMS_INTERPRETED
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
