"""Backward kernels of sink tokens without a gate: dk and dv from the queries whose window they left.

Every later query sees the sink tokens of a local head, so one program that iterates over all of them would take many
times as long as any other. The kernel of dq, whose programs hold all queries, stores partial sums for the first SINKS
keys instead, and a second kernel adds them in a fixed order. Further sink tokens are rare, and are left to the kernel
of dk and dv. (With soft gates the gate of a sink token is 1, and with hard gates it is among the gathered keys.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from spkv_kernels.triton.common import SINKS, cap_scores, cap_slope


@triton.jit
def store_sink_gradients(
    p_part_dk, p_part_dv, b_q, b_grad, b_lse, b_delta, o_t, last, p_k, stride_k, p_v, stride_v,
    num_keys, window, scale, softcap,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store dk (without its scale) and dv [SINKS, D], float32, of the first ``num_keys`` keys, from a tile of queries.

    Further rows stay unwritten, as does everything if all queries up to ``last`` have key 0 in their window. Scores
    are computed transposed, keys by queries.
    """
    if tl.minimum(num_keys, last - window) > 0:
        # Load the keys and values
        o_s = tl.arange(0, SINKS)
        o_d = tl.arange(0, BLOCK_D)
        m_row = (o_s < num_keys)[:, None] & (o_d < SIZE)[None, :]
        b_k = tl.load(p_k + o_s[:, None] * stride_k + o_d[None, :], mask=m_row, other=0.0)
        b_v = tl.load(p_v + o_s[:, None] * stride_v + o_d[None, :], mask=m_row, other=0.0)
        # Transposed scores of queries outside the window [SINKS, BLOCK_M]
        scores = tl.dot(b_k, tl.trans(b_q), input_precision="ieee") * scale
        if softcap is not None:
            scores = cap_scores(scores, softcap)
            slope = cap_slope(scores, softcap)
        scores = tl.where(o_t[None, :] >= (o_s + window)[:, None], scores, -float("inf"))
        p = tl.exp2(scores - b_lse[None, :])
        # dv, dS and dk
        b_dv = tl.dot(p.to(b_grad.dtype), b_grad, input_precision="ieee")
        dp = tl.dot(b_v, tl.trans(b_grad), input_precision="ieee")
        ds = p * (dp - b_delta[None, :])
        if softcap is not None:
            ds = ds * slope
        b_dk = tl.dot(ds.to(b_q.dtype), b_q, input_precision="ieee")
        o_part = o_s[:, None] * SIZE + o_d[None, :]
        tl.store(p_part_dk + o_part, b_dk, mask=m_row)
        tl.store(p_part_dv + o_part, b_dv, mask=m_row)


@triton.jit
def attention_bwd_sink_sum_kernel(
    p_part_dk, p_part_dv, p_windows, p_sinks, p_far_dk, p_far_dv,
    length, heads,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum part_dk and part_dv [B * Hq, blocks of queries, SINKS, D] over queries and groups. Grid: SINKS * B * Hkv.

    far_dk and far_dv [B * Hkv, SINKS, D] stay unwritten for keys that are no sinks, or never leave a window.
    """
    PARTS: tl.constexpr = 2048 // BLOCK_D
    kv_row = tl.program_id(0) // SINKS
    key = tl.program_id(0) % SINKS
    window = tl.minimum(tl.load(p_windows + kv_row % heads), length)
    if key < tl.minimum(tl.load(p_sinks + kv_row % heads), length - window):
        # Tiles of queries from which some query is outside the window of key 0, for each query head
        blocks = tl.cdiv(length, BLOCK_M)
        low = window // BLOCK_M
        num_parts = GROUP * (blocks - low)
        o_d = tl.arange(0, BLOCK_D)
        dk = tl.zeros([PARTS, BLOCK_D], tl.float32)
        dv = tl.zeros([PARTS, BLOCK_D], tl.float32)
        for start in range(0, num_parts, PARTS):
            o_p = start + tl.arange(0, PARTS)
            o_block = (
                (kv_row.to(tl.int64) * GROUP + o_p // (blocks - low)) * blocks
                + low
                + o_p % (blocks - low)
            )
            o_part = (o_block * SINKS + key)[:, None] * SIZE + o_d[None, :]
            m_part = (o_p < num_parts)[:, None] & (o_d < SIZE)[None, :]
            dk += tl.load(p_part_dk + o_part, mask=m_part, other=0.0)
            dv += tl.load(p_part_dv + o_part, mask=m_part, other=0.0)
        o_far = tl.program_id(0).to(tl.int64) * SIZE + o_d
        tl.store(p_far_dk + o_far, tl.sum(dk, 0), mask=o_d < SIZE)
        tl.store(p_far_dv + o_far, tl.sum(dv, 0), mask=o_d < SIZE)
