"""Forward kernel: flash attention with a window per KV head and a gate on the keys outside it.

A program computes BLOCK_M queries of one query head. It visits their keys in up to three loops, so that only tiles that
need a mask pay for one (kernels/README.md has a diagram):

    MIXED        the diagonal, and the tiles that the far edge of some query's window crosses
    PLAIN        tiles inside the window of all BLOCK_M queries, and with soft gates those outside of all
    KEPT, STAIR  hard gates: the gathered kept keys, and the last of them, where queries differ in what they see
    STAIR        without a gate: the sink tokens that some query's window has left

MIXED comes first: it includes each query's own key, so the running maximum is finite from then on. A learned sink is
the initial state of the softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spkv_kernels.triton.common import (
    HARD,
    KEPT,
    LOG2E,
    MIXED,
    NONE,
    PLAIN,
    SINKS,
    SOFT,
    STAIR,
    add_bias,
    cap_scores,
    kept_ranges,
    key_ranges,
    load_gate,
    load_positions,
    load_rows,
    store_rows,
)


@triton.jit
def _visit(
    acc,
    total,
    largest,
    b_q,
    o_t,
    b_start,
    p_k,
    stride_k,
    p_v,
    stride_v,
    p_gate,
    p_positions,
    low,
    high,
    jump,
    gap,
    stop,
    window,
    scale,
    softcap,
    MODE: tl.constexpr,
    PHASE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Run the online softmax over tiles of keys from ``low`` up to ``high``; from ``jump`` on, ``gap`` further.

    Keys from ``stop`` on do not exist; those before ``b_start`` belong to other documents.
    """
    CUT: tl.constexpr = (PHASE == MIXED) | (PHASE == STAIR)  # the last tile may reach past the end
    for tile in range(low, high, BLOCK_N):
        start = tl.multiple_of(tl.where(tile < jump, tile, tile + gap), BLOCK_N)
        o_s = start + tl.arange(0, BLOCK_N)
        # Scores [BLOCK_M, BLOCK_N]
        b_k = load_rows(p_k, start, stride_k, stop, SIZE, BLOCK_N, BLOCK_D, CUT)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if softcap is not None:
            scores = cap_scores(scores, softcap)
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
        # Update the running softmax
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        reference = new_largest
        if PHASE == MIXED:  # a query may not have seen its own key yet
            reference = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        p = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(p, 1)
        b_v = load_rows(p_v, start, stride_v, stop, SIZE, BLOCK_N, BLOCK_D, CUT)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return acc, total, largest


@triton.jit
def attention_fwd_kernel(
    p_q,
    p_k,
    p_v,
    p_gate,
    p_far_k,
    p_far_v,
    p_positions,
    p_rank,
    p_windows,
    p_sinks,
    p_sink_logits,
    p_starts,
    p_out,
    p_lse,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    scale,
    softcap,
    length,
    heads,
    GROUP: tl.constexpr,
    MODE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute out [B, Hq, T, D] and the base-2 log-sum-exp [B, Hq, T], float32.

    Grid: blocks of queries * B * Hq. gate, rank and positions [B * Hkv, T], far_k and far_v [B * Hkv, T, D] are
    contiguous, and out has the memory layout [B, T, Hq, D]; of q, k and v only D must be contiguous. ``rank`` counts
    the kept keys up to and including each position. ``sinks`` int32 [Hkv] (without a gate only) and ``sink_logits``
    float32 [Hq] may be None, and so may ``starts`` int32 [B, T], without sink tokens only, and ``softcap``, in base 2.
    """
    # Locate the queries and their KV head
    blocks = tl.cdiv(length, BLOCK_M)
    row = tl.program_id(0) // blocks  # b * Hq + query head
    first = (
        blocks - 1 - tl.program_id(0) % blocks
    ) * BLOCK_M  # the longest rows of a head start first
    last = tl.minimum(first + BLOCK_M, length)
    kv_row = row // GROUP  # b * Hkv + KV head
    batch = (kv_row // heads).to(tl.int64)
    head = (kv_row % heads).to(tl.int64)
    query_head = (row % (heads * GROUP)).to(tl.int64)
    window = tl.minimum(tl.load(p_windows + head), length)
    o_gate = kv_row.to(tl.int64) * length
    p_k += batch * stride_kb + head * stride_kh
    p_v += batch * stride_vb + head * stride_vh
    if MODE == SOFT:
        p_gate += o_gate
    # Load the queries
    o_t = first + tl.arange(0, BLOCK_M)
    p_q += batch * stride_qb + query_head * stride_qh
    b_q = load_rows(p_q, first, stride_qt, length, SIZE, BLOCK_M, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if p_sink_logits is not None:  # a learned sink of -inf vanishes with the first key
        total += 1.0
        largest = tl.zeros([BLOCK_M], tl.float32) + tl.load(p_sink_logits + query_head) * LOG2E

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
    acc, total, largest = _visit(
        acc,
        total,
        largest,
        b_q,
        o_t,
        b_start,
        p_k,
        stride_kt,
        p_v,
        stride_vt,
        p_gate,
        p_positions,
        edge,
        last - (diagonal - inside),
        inside,
        diagonal - inside,
        length,
        window,
        scale,
        softcap,
        MODE,
        MIXED,
        SIZE,
        BLOCK_N,
        BLOCK_D,
    )
    if MODE == HARD:
        p_far_k += o_gate * SIZE
        p_far_v += o_gate * SIZE
        p_positions += o_gate
        low, stair, kept = kept_ranges(p_rank + o_gate, first, last, window, oldest, BLOCK_N)
        acc, total, largest = _visit(
            acc,
            total,
            largest,
            b_q,
            o_t,
            b_start,
            p_far_k,
            SIZE,
            p_far_v,
            SIZE,
            p_gate,
            p_positions,
            low,
            stair,
            kept,
            0,
            kept,
            window,
            scale,
            softcap,
            MODE,
            KEPT,
            SIZE,
            BLOCK_N,
            BLOCK_D,
        )
        acc, total, largest = _visit(
            acc,
            total,
            largest,
            b_q,
            o_t,
            b_start,
            p_far_k,
            SIZE,
            p_far_v,
            SIZE,
            p_gate,
            p_positions,
            stair,
            kept,
            kept,
            0,
            kept,
            window,
            scale,
            softcap,
            MODE,
            STAIR,
            SIZE,
            BLOCK_N,
            BLOCK_D,
        )
    else:
        acc, total, largest = _visit(
            acc,
            total,
            largest,
            b_q,
            o_t,
            b_start,
            p_k,
            stride_kt,
            p_v,
            stride_vt,
            p_gate,
            p_positions,
            start if MODE == SOFT else edge,
            edge + (diagonal - inside),
            edge,
            inside - edge,
            length,
            window,
            scale,
            softcap,
            MODE,
            PLAIN,
            SIZE,
            BLOCK_N,
            BLOCK_D,
        )
    if p_sinks is not None:
        num_sinks = tl.minimum(tl.load(p_sinks + head), last - window)
        acc, total, largest = _visit(
            acc,
            total,
            largest,
            b_q,
            o_t,
            b_start,
            p_k,
            stride_kt,
            p_v,
            stride_vt,
            p_gate,
            p_positions,
            0,
            num_sinks,
            num_sinks,
            0,
            num_sinks,
            window,
            scale,
            softcap,
            MODE,
            STAIR,
            SIZE,
            BLOCK_N if p_q.dtype.element_ty == tl.float32 else SINKS,
            BLOCK_D,
        )

    # Store the output
    total = tl.where(o_t < length, total, 1.0)  # queries past the end may have seen nothing
    width = heads * GROUP * SIZE
    p_out += batch * length * width + query_head * SIZE
    store_rows(p_out, first, width, length, acc / total[:, None], SIZE, BLOCK_M, BLOCK_D)
    tl.store(p_lse + row.to(tl.int64) * length + o_t, largest + tl.log2(total), mask=o_t < length)
