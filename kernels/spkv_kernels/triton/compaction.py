"""Compaction: gather the kept keys and values of each (batch, KV head), in ascending position, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spkv_kernels.triton.common import load_rows

_BLOCK = 64  # tokens per program


class Kept(NamedTuple):
    """Gathered keys, in buffers for all T tokens, because the host does not know the counts; the rest is unwritten.

    Attributes:
        k: keys [B * Hkv, T, D], the kept rows first.
        v: values [B * Hkv, T, D], likewise.
        positions: int32 [B * Hkv, T], ascending.
        rank: int32 [B * Hkv, T], number of kept keys up to and including each position.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    rank: Tensor


@triton.jit
def compact_kernel(
    p_k,
    p_v,
    p_keep,
    p_rank,
    p_far_k,
    p_far_v,
    p_positions,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    length,
    heads,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy the kept rows of a block of tokens to their slots. Grid: blocks of tokens * B * Hkv."""
    # Locate the tokens
    blocks = tl.cdiv(length, BLOCK)
    kv_row = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK
    batch = (kv_row // heads).to(tl.int64)
    head = (kv_row % heads).to(tl.int64)
    o_gate = kv_row.to(tl.int64) * length
    o_s = first + tl.arange(0, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    # Find the slots of kept tokens
    kept = tl.load(p_keep + o_gate + o_s, mask=o_s < length, other=0) != 0
    slot = tl.load(p_rank + o_gate + o_s, mask=kept, other=1) - 1
    tl.store(p_positions + o_gate + slot, o_s, mask=kept)
    # Copy their keys and values
    o_far = (o_gate + slot)[:, None] * SIZE + o_d[None, :]
    m_far = kept[:, None] & (o_d < SIZE)[None, :]
    b_k = load_rows(
        p_k + batch * stride_kb + head * stride_kh,
        first,
        stride_kt,
        length,
        SIZE,
        BLOCK,
        BLOCK_D,
        True,
    )
    tl.store(p_far_k + o_far, b_k, mask=m_far)
    b_v = load_rows(
        p_v + batch * stride_vb + head * stride_vh,
        first,
        stride_vt,
        length,
        SIZE,
        BLOCK,
        BLOCK_D,
        True,
    )
    tl.store(p_far_v + o_far, b_v, mask=m_far)


def compact(k: Tensor, v: Tensor, keep: Tensor, block_d: int) -> Kept:
    """Gather the kept rows of k, v [B, Hkv, T, D] by ``keep`` bool [B, Hkv, T], without synchronising.

    ``block_d`` is D, padded to a power of two that is at least 16.
    """
    batch, heads, length, size = k.shape
    keep = keep.contiguous()
    rank = keep.flatten(0, 1).cumsum(-1, dtype=torch.int32)
    far_k, far_v = (
        k.new_empty(batch * heads, length, size),
        v.new_empty(batch * heads, length, size),
    )
    positions = torch.empty_like(rank)
    grid = (-(-length // _BLOCK) * batch * heads,)
    compact_kernel[grid](
        k,
        v,
        keep.view(torch.uint8),
        rank,
        far_k,
        far_v,
        positions,
        *k.stride()[:3],
        *v.stride()[:3],
        length,
        heads,
        SIZE=size,
        BLOCK=_BLOCK,
        BLOCK_D=block_d,
    )
    return Kept(far_k, far_v, positions, rank)
