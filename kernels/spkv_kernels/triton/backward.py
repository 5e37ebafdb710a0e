"""Backward kernels: dq (which also stores delta = <dout, out>), dk, dv and d log u, without atomics.

    p = exp2(s - lse),   dS = p * (<dout, v> - delta),   dv = sum_t p dout,   dk = scale * sum_t dS q,
    dq = scale * sum_s dS k,   d log u_s = sum over t outside the window, and over the query heads, of dS

The kernel of dq loops over keys as the forward kernel does. That of dk and dv loops over the queries of a block of keys
and over the G query heads that share them, so it sums over all of them itself; it computes scores transposed, keys by
queries, and never transposes dS. For hard gates, the contribution of far queries to kept keys comes from a kernel over
the gathered keys, which stores it in float32 at the keys' positions, from where the kernel of the window continues.
Sink tokens without a gate: ``spkv_kernels.triton.sinks``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spkv_kernels.triton.common import (
    HARD,
    KEPT,
    LOG2E,
    MIXED,
    NEVER,
    NONE,
    PLAIN,
    SINKS,
    SOFT,
    STAIR,
    add_bias,
    cap_scores,
    cap_slope,
    kept_ranges,
    key_ranges,
    load_gate,
    load_positions,
    load_rows,
    load_values,
    store_rows,
)
from spkv_kernels.triton.sinks import store_sink_gradients


@triton.jit
def _visit_keys(
    b_dq, b_q, b_grad, b_lse, b_delta, o_t, b_start,
    p_k, stride_k, p_v, stride_v, p_gate, p_positions,
    low, high, jump, gap, stop, window, scale, softcap,
    MODE: tl.constexpr, PHASE: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Accumulate dq over tiles of keys; the arguments are those of ``_visit`` in the forward kernel."""
    CUT: tl.constexpr = (PHASE == MIXED) | (PHASE == STAIR)
    for tile in range(low, high, BLOCK_N):
        start = tl.multiple_of(tl.where(tile < jump, tile, tile + gap), BLOCK_N)
        o_s = start + tl.arange(0, BLOCK_N)
        # Scores [BLOCK_M, BLOCK_N]
        b_k = load_rows(p_k, start, stride_k, stop, SIZE, BLOCK_N, BLOCK_D, CUT)
        b_v = load_rows(p_v, start, stride_v, stop, SIZE, BLOCK_N, BLOCK_D, CUT)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if softcap is not None:
            scores = cap_scores(scores, softcap)
            slope = cap_slope(scores, softcap)
        gate = load_gate(p_gate, o_s, stop, tile < jump, MODE, PHASE)
        position = load_positions(p_positions, o_s, stop, b_start, PHASE)
        scores = add_bias(
            scores,
            o_t[:, None],
            position[None, :],
            (position + window)[None, :],
            gate[None, :],
            MODE,
            PHASE,
        )
        if b_start is not None and not (MODE == NONE and PHASE == PLAIN):
            scores = tl.where(position[None, :] >= b_start[:, None], scores, -float("inf"))
        # dS and dq
        p = tl.exp2(scores - b_lse[:, None])
        dp = tl.dot(b_grad, tl.trans(b_v), input_precision="ieee")
        ds = p * (dp - b_delta[:, None])
        if softcap is not None:
            ds = ds * slope
        b_dq = tl.dot(ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee")
    return b_dq


@triton.jit
def attention_bwd_dq_kernel(
    p_q, p_k, p_v, p_gate, p_far_k, p_far_v, p_positions, p_rank, p_windows, p_sinks, p_starts, p_out, p_lse, p_grad,
    p_delta, p_dq, p_part_dk, p_part_dv,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt,
    scale, softcap, length, heads,
    GROUP: tl.constexpr, MODE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute dq, laid out as out, and delta [B, Hq, T], float32. Grid and layouts as in the forward kernel.

    With sink tokens (int32 [Hkv], without a gate only) also part_dk and part_dv, see ``store_sink_gradients``.
    """
    # Locate the queries and their KV head
    blocks = tl.cdiv(length, BLOCK_M)
    row = tl.program_id(0) // blocks
    first = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    last = tl.minimum(first + BLOCK_M, length)
    kv_row = row // GROUP
    batch = (kv_row // heads).to(tl.int64)
    head = (kv_row % heads).to(tl.int64)
    query_head = (row % (heads * GROUP)).to(tl.int64)
    window = tl.minimum(tl.load(p_windows + head), length)
    o_gate = kv_row.to(tl.int64) * length
    p_k += batch * stride_kb + head * stride_kh
    p_v += batch * stride_vb + head * stride_vh
    if MODE == SOFT:
        p_gate += o_gate
    o_t = first + tl.arange(0, BLOCK_M)
    width = heads * GROUP * SIZE
    o_out = batch * length * width + query_head * SIZE
    p_q += batch * stride_qb + query_head * stride_qh
    p_grad += batch * stride_gb + query_head * stride_gh
    # Load the queries, and compute delta
    b_q = load_rows(p_q, first, stride_qt, length, SIZE, BLOCK_M, BLOCK_D, True)
    b_grad = load_rows(p_grad, first, stride_gt, length, SIZE, BLOCK_M, BLOCK_D, True)
    b_out = load_rows(p_out + o_out, first, width, length, SIZE, BLOCK_M, BLOCK_D, True)
    b_delta = tl.sum(b_grad.to(tl.float32) * b_out.to(tl.float32), 1)
    o_row = row.to(tl.int64) * length + o_t
    tl.store(p_delta + o_row, b_delta, mask=o_t < length)
    b_lse = tl.load(p_lse + o_row, mask=o_t < length, other=float("inf"))
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Visit the keys by phase
    b_start = None
    oldest = 0
    newest = 0
    if p_starts is not None:
        p_starts += batch * length
        b_start = tl.load(p_starts + o_t, mask=o_t < length, other=0)
        oldest = tl.load(p_starts + first)
        newest = tl.load(p_starts + last - 1)
    start, edge, inside, diagonal = key_ranges(first, last, window, oldest, newest, MODE, BLOCK_N)
    b_dq = _visit_keys(
        b_dq, b_q, b_grad, b_lse, b_delta, o_t, b_start, p_k, stride_kt, p_v, stride_vt, p_gate, p_positions,
        edge, last - (diagonal - inside), inside, diagonal - inside, length,
        window, scale, softcap, MODE, MIXED, SIZE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if MODE == HARD:
        p_far_k += o_gate * SIZE
        p_far_v += o_gate * SIZE
        p_positions += o_gate
        low, stair, kept = kept_ranges(p_rank + o_gate, first, last, window, oldest, BLOCK_N)
        b_dq = _visit_keys(
            b_dq, b_q, b_grad, b_lse, b_delta, o_t, b_start, p_far_k, SIZE, p_far_v, SIZE, p_gate, p_positions,
            low, stair, kept, 0, kept, window, scale, softcap, MODE, KEPT, SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        b_dq = _visit_keys(
            b_dq, b_q, b_grad, b_lse, b_delta, o_t, b_start, p_far_k, SIZE, p_far_v, SIZE, p_gate, p_positions,
            stair, kept, kept, 0, kept, window, scale, softcap, MODE, STAIR, SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    else:
        b_dq = _visit_keys(
            b_dq, b_q, b_grad, b_lse, b_delta, o_t, b_start, p_k, stride_kt, p_v, stride_vt, p_gate, p_positions,
            start if MODE == SOFT else edge, edge + (diagonal - inside), edge, inside - edge, length,
            window, scale, softcap, MODE, PLAIN, SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    if p_sinks is not None:
        sinks = tl.load(p_sinks + head)
        num_sinks = tl.minimum(sinks, last - window)
        b_dq = _visit_keys(
            b_dq, b_q, b_grad, b_lse, b_delta, o_t, b_start, p_k, stride_kt, p_v, stride_vt, p_gate, p_positions,
            0, num_sinks, num_sinks, 0, num_sinks, window, scale, softcap, MODE, STAIR, SIZE, SINKS, BLOCK_D,
        )  # fmt: skip
    store_rows(p_dq + o_out, first, width, length, b_dq * (scale / LOG2E), SIZE, BLOCK_M, BLOCK_D)
    if p_sinks is not None:  # after dq is stored, whose registers are then free
        o_part = (row.to(tl.int64) * blocks + first // BLOCK_M) * SINKS * SIZE
        store_sink_gradients(
            p_part_dk + o_part, p_part_dv + o_part, b_q, b_grad, b_lse, b_delta, o_t, last,
            p_k, stride_kt, p_v, stride_vt, tl.minimum(sinks, length - window), window, scale, softcap, SIZE, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _visit_queries(
    b_dk, b_dv, b_dgate, b_k, b_v, b_gate, o_s, b_end,
    p_q, stride_qh, stride_qt, p_grad, stride_gh, stride_gt, p_lse, p_delta,
    low, high, jump, gap, length, window, scale, softcap,
    GROUP: tl.constexpr, MODE: tl.constexpr, PHASE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Accumulate dk (without its scale), dv and d log u of keys at positions ``o_s`` over their query heads.

    ``window`` is a number, or one for each key; queries from ``b_end`` on belong to other documents. Visits tiles of
    queries from ``low`` up to ``high``; from ``jump`` on, ``gap`` further. Queries past the end have an infinite lse,
    so that p = 0. A single loop covers all heads, because nested loops spill registers.
    """
    tiles = tl.cdiv(tl.maximum(high - low, 0), BLOCK_M)
    # Dividing by zero lets the compiler load ahead of a loop that never runs
    divisor = tl.maximum(tiles, 1)
    o_left = o_s + window
    for index in range(GROUP * tiles):
        # Load a tile of queries of one head
        member = (index // divisor).to(tl.int64)
        tile = low + index % divisor * BLOCK_M
        start = tl.multiple_of(tl.where(tile < jump, tile, tile + gap), BLOCK_M)
        o_t = start + tl.arange(0, BLOCK_M)
        b_q = load_rows(
            p_q + member * stride_qh, start, stride_qt, length, SIZE, BLOCK_M, BLOCK_D, not EVEN
        )
        b_lse = load_values(p_lse + member * length + o_t, o_t < length, float("inf"), EVEN)
        # Transposed scores [BLOCK_N, BLOCK_M]
        scores = tl.dot(b_k, tl.trans(b_q), input_precision="ieee") * scale
        if softcap is not None:
            scores = cap_scores(scores, softcap)
            slope = cap_slope(scores, softcap)
        gate = b_gate
        if PHASE == PLAIN:
            gate = tl.where(tile < jump, 0.0, b_gate)
        scores = add_bias(
            scores, o_t[None, :], o_s[:, None], o_left[:, None], gate[:, None], MODE, PHASE
        )
        if b_end is not None and not (MODE == NONE and PHASE == PLAIN):
            scores = tl.where(o_t[None, :] < b_end[:, None], scores, -float("inf"))
        p = tl.exp2(scores - b_lse[None, :])
        # dv, dS and dk
        b_grad = load_rows(
            p_grad + member * stride_gh, start, stride_gt, length, SIZE, BLOCK_M, BLOCK_D, not EVEN
        )
        b_dv = tl.dot(p.to(b_grad.dtype), b_grad, b_dv, input_precision="ieee")
        b_delta = load_values(p_delta + member * length + o_t, o_t < length, 0.0, EVEN)
        dp = tl.dot(b_v, tl.trans(b_grad), input_precision="ieee")
        ds = p * (dp - b_delta[None, :])
        ds_capped = ds
        if softcap is not None:
            ds_capped = ds * slope
        b_dk = tl.dot(ds_capped.to(b_q.dtype), b_q, b_dk, input_precision="ieee")
        # d log u: dS of queries outside the window
        if MODE == SOFT:
            if PHASE == PLAIN:
                b_dgate += tl.where(tile < jump, 0.0, tl.sum(ds, 1))
            else:
                b_dgate += tl.sum(tl.where(o_t[None, :] >= o_left[:, None], ds, 0.0), 1)
    return b_dk, b_dv, b_dgate


@triton.jit
def attention_bwd_dkdv_kernel(
    p_q, p_k, p_v, p_gate, p_keep, p_far_dk, p_far_dv, p_windows, p_sinks, p_ends, p_lse, p_grad, p_delta,
    p_dk, p_dv, p_dgate,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt,
    scale, softcap, length, heads,
    GROUP: tl.constexpr, MODE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv [B, T, Hkv, D], and with soft gates d log u [B * Hkv, T], float32.

    Grid: blocks of keys * B * Hkv. With hard gates it covers the keys inside the window, and adds the results of
    ``attention_bwd_far_dkdv_kernel`` for kept keys. With sink tokens (int32 [Hkv], without a gate only) it adds far_dk
    and far_dv [B * Hkv, SINKS, D] of the first SINKS keys; later ones never leave the window. ``ends`` int32 [B, T],
    the position after each key's document, may be None, and so may ``softcap``, in base 2.
    """
    # Locate and load the keys
    blocks = tl.cdiv(length, BLOCK_N)
    kv_row = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK_N  # keys with most queries start first
    last = tl.minimum(first + BLOCK_N, length)
    batch = (kv_row // heads).to(tl.int64)
    head = (kv_row % heads).to(tl.int64)
    window = tl.minimum(tl.load(p_windows + head), length)
    o_gate = kv_row.to(tl.int64) * length
    p_k += batch * stride_kb + head * stride_kh
    p_v += batch * stride_vb + head * stride_vh
    o_s = first + tl.arange(0, BLOCK_N)
    b_k = load_rows(p_k, first, stride_kt, length, SIZE, BLOCK_N, BLOCK_D, True)
    b_v = load_rows(p_v, first, stride_vt, length, SIZE, BLOCK_N, BLOCK_D, True)
    b_gate = tl.zeros([BLOCK_N], tl.float32)
    if MODE == SOFT:
        b_gate = tl.load(p_gate + o_gate + o_s, mask=o_s < length, other=0.0) * LOG2E
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dgate = tl.zeros([BLOCK_N], tl.float32)
    # Start from the contribution of far queries
    if MODE == HARD:
        kept = tl.load(p_keep + o_gate + o_s, mask=o_s < length, other=0) != 0
        o_far = (o_gate + o_s)[:, None] * SIZE + tl.arange(0, BLOCK_D)[None, :]
        m_far = kept[:, None] & (tl.arange(0, BLOCK_D) < SIZE)[None, :]
        b_dk = tl.load(p_far_dk + o_far, mask=m_far, other=0.0)
        b_dv = tl.load(p_far_dv + o_far, mask=m_far, other=0.0)
    # Likewise for sink tokens, of which those after the first SINKS stay in reach of all later queries
    reach = window
    newest = last - 1 + window
    if p_sinks is not None:
        num_sinks = tl.load(p_sinks + head)
        m_far = (o_s < tl.minimum(tl.minimum(num_sinks, SINKS), length - window))[:, None]
        m_far = m_far & (tl.arange(0, BLOCK_D) < SIZE)[None, :]
        o_far = (kv_row.to(tl.int64) * SINKS + o_s)[:, None] * SIZE + tl.arange(0, BLOCK_D)[None, :]
        b_dk = tl.load(p_far_dk + o_far, mask=m_far, other=0.0)
        b_dv = tl.load(p_far_dv + o_far, mask=m_far, other=0.0)
        reach = tl.where((o_s >= SINKS) & (o_s < num_sinks), NEVER, window)
        newest = tl.where(
            (num_sinks > SINKS) & (last > SINKS) & (first < num_sinks), length, newest
        )

    # Phases in whole tiles of queries: from ``inside`` to ``edge`` all keys are in all windows, from ``far`` on in none
    b_end = None
    all_end = length
    end = length
    if p_ends is not None:
        p_ends += batch * length
        b_end = tl.load(p_ends + o_s, mask=o_s < length, other=0)
        all_end = tl.load(p_ends + first)
        end = tl.load(p_ends + last - 1)
    diagonal = first // BLOCK_M * BLOCK_M
    inside = tl.cdiv(last - 1, BLOCK_M) * BLOCK_M
    far = tl.cdiv(tl.minimum(newest, end), BLOCK_M) * BLOCK_M
    edge = tl.minimum(
        tl.maximum(tl.minimum(first + window, all_end) // BLOCK_M * BLOCK_M, inside), far
    )
    if MODE == HARD:
        edge = inside
    # Visit the queries by phase
    query_head = head * GROUP
    p_q += batch * stride_qb + query_head * stride_qh
    p_grad += batch * stride_gb + query_head * stride_gh
    o_row = (batch * heads * GROUP + query_head) * length
    b_dk, b_dv, b_dgate = _visit_queries(
        b_dk, b_dv, b_dgate, b_k, b_v, b_gate, o_s, b_end,
        p_q, stride_qh, stride_qt, p_grad, stride_gh, stride_gt, p_lse + o_row, p_delta + o_row,
        diagonal, far - (edge - inside), inside, edge - inside, length, reach, scale, softcap,
        GROUP, MODE, MIXED, SIZE, BLOCK_M, BLOCK_D, EVEN,
    )  # fmt: skip
    if MODE != HARD:
        b_dk, b_dv, b_dgate = _visit_queries(
            b_dk, b_dv, b_dgate, b_k, b_v, b_gate, o_s, b_end,
            p_q, stride_qh, stride_qt, p_grad, stride_gh, stride_gt, p_lse + o_row, p_delta + o_row,
            inside, end - (far - edge) if MODE == SOFT else edge, edge, far - edge, length, reach, scale, softcap,
            GROUP, MODE, PLAIN, SIZE, BLOCK_M, BLOCK_D, EVEN,
        )  # fmt: skip
    # Store the gradients
    width = heads * SIZE
    o_out = batch * length * width + head * SIZE
    store_rows(p_dk + o_out, first, width, length, b_dk * (scale / LOG2E), SIZE, BLOCK_N, BLOCK_D)
    store_rows(p_dv + o_out, first, width, length, b_dv, SIZE, BLOCK_N, BLOCK_D)
    if MODE == SOFT:
        tl.store(p_dgate + o_gate + o_s, b_dgate, mask=o_s < length)


@triton.jit
def attention_bwd_far_dkdv_kernel(
    p_q, p_far_k, p_far_v, p_positions, p_rank, p_windows, p_ends, p_lse, p_grad, p_delta, p_far_dk, p_far_dv,
    stride_qb, stride_qh, stride_qt, stride_gb, stride_gh, stride_gt,
    scale, softcap, length, heads,
    GROUP: tl.constexpr, MODE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute dk (without its scale) and dv of kept keys from the queries whose window they left.

    far_dk and far_dv [B * Hkv, T, D], float32, are stored at the keys' positions; other positions stay unwritten. Grid:
    blocks of gathered keys * B * Hkv; blocks past a head's count return at once.
    """
    # Locate and load the gathered keys
    blocks = tl.cdiv(length, BLOCK_N)
    kv_row = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK_N
    o_gate = kv_row.to(tl.int64) * length
    count = tl.load(p_rank + o_gate + length - 1)
    if first < count:
        batch = (kv_row // heads).to(tl.int64)
        head = (kv_row % heads).to(tl.int64)
        window = tl.minimum(tl.load(p_windows + head), length)
        o_kept = first + tl.arange(0, BLOCK_N)
        p_positions += o_gate
        o_s = tl.load(p_positions + o_kept, mask=o_kept < count, other=NEVER)
        b_k = load_rows(p_far_k + o_gate * SIZE, first, SIZE, count, SIZE, BLOCK_N, BLOCK_D, True)
        b_v = load_rows(p_far_v + o_gate * SIZE, first, SIZE, count, SIZE, BLOCK_N, BLOCK_D, True)
        b_gate = tl.zeros([BLOCK_N], tl.float32)
        b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        b_dgate = tl.zeros([BLOCK_N], tl.float32)
        # Find the first tile of queries that see any of them, and the first in which all queries see all of them
        oldest = tl.load(p_positions + first)
        newest = tl.load(p_positions + tl.minimum(first + BLOCK_N, count) - 1)
        b_end = None
        end = length
        if p_ends is not None:
            p_ends += batch * length
            b_end = tl.load(p_ends + o_s, mask=o_s < length, other=0)
            end = tl.load(p_ends + newest)
        stair = (oldest + window) // BLOCK_M * BLOCK_M
        far = tl.cdiv(tl.minimum(newest + window, end), BLOCK_M) * BLOCK_M
        # Visit the queries
        query_head = head * GROUP
        p_q += batch * stride_qb + query_head * stride_qh
        p_grad += batch * stride_gb + query_head * stride_gh
        o_row = (batch * heads * GROUP + query_head) * length
        b_dk, b_dv, b_dgate = _visit_queries(
            b_dk, b_dv, b_dgate, b_k, b_v, b_gate, o_s, b_end,
            p_q, stride_qh, stride_qt, p_grad, stride_gh, stride_gt, p_lse + o_row, p_delta + o_row,
            stair, far, far, 0, length, window, scale, softcap, GROUP, MODE, STAIR, SIZE, BLOCK_M, BLOCK_D, EVEN,
        )  # fmt: skip
        b_dk, b_dv, b_dgate = _visit_queries(
            b_dk, b_dv, b_dgate, b_k, b_v, b_gate, o_s, b_end,
            p_q, stride_qh, stride_qt, p_grad, stride_gh, stride_gt, p_lse + o_row, p_delta + o_row,
            far, end, end, 0, length, window, scale, softcap, GROUP, MODE, KEPT, SIZE, BLOCK_M, BLOCK_D, EVEN,
        )  # fmt: skip
        # Store at the positions of the keys
        o_far = (o_gate + o_s)[:, None] * SIZE + tl.arange(0, BLOCK_D)[None, :]
        m_far = (o_kept < count)[:, None] & (tl.arange(0, BLOCK_D) < SIZE)[None, :]
        tl.store(p_far_dk + o_far, b_dk, mask=m_far)
        tl.store(p_far_dv + o_far, b_dv, mask=m_far)
