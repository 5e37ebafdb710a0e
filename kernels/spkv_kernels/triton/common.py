"""What forward and backward kernels share: gate modes, phases of the inner loop, the bias of a tile of scores.

Scores are in base 2 inside the kernels: the scale and ``log u`` are multiplied by log2(e), exponentials are ``exp2``.
"""

from __future__ import annotations

import triton
import triton.language as tl

# gate modes
NONE = tl.constexpr(0)
SOFT = tl.constexpr(1)
HARD = tl.constexpr(2)

# phases: which tiles of scores a loop visits
PLAIN = tl.constexpr(0)  # wholly inside the window of every query, or wholly outside (soft gates): no mask
MIXED = tl.constexpr(1)  # the future, the window and beyond, told apart by position
KEPT = tl.constexpr(2)  # gathered keys that have left the window of every query: no mask
STAIR = tl.constexpr(3)  # gathered keys that have left the window of some queries

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(1 << 30)  # position of a key that no query sees


@triton.jit
def add_bias(scores, query, key, left, gate, MODE: tl.constexpr, PHASE: tl.constexpr):
    """Scores of a tile with the operator's bias.

    ``query`` and ``key`` are positions, ``left`` = key + window is the first query whose window the key has left,
    ``gate`` is log u, zero in a PLAIN tile inside the window; all broadcast to the tile.
    """
    if PHASE == MIXED:
        if MODE == SOFT:
            scores = tl.where(query < left, scores, scores + gate)
            scores = tl.where(query >= key, scores, -float("inf"))
        else:
            scores = tl.where((query >= key) & (query < left), scores, -float("inf"))
    elif PHASE == STAIR:
        scores = tl.where(query >= left, scores, -float("inf"))
    elif PHASE == PLAIN and MODE == SOFT:
        scores = scores + gate
    return scores


@triton.jit
def load_rows(
    base, start, stride, stop,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """[BLOCK, BLOCK_D]: rows from ``start`` of a [*, SIZE] matrix; zeros beyond SIZE and, with ROWS, from ``stop`` on.

    The offset of the tile is 64 bits wide, those within it need 32.
    """
    o_row = tl.arange(0, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    p_tile = base + start.to(tl.int64) * stride + (o_row[:, None] * stride + o_d[None, :])
    if ROWS:
        return tl.load(p_tile, mask=(start + o_row < stop)[:, None] & (o_d < SIZE)[None, :], other=0.0)
    if SIZE != BLOCK_D:
        return tl.load(p_tile, mask=(o_d < SIZE)[None, :], other=0.0)
    return tl.load(p_tile)


@triton.jit
def load_values(pointers, mask, other, EVEN: tl.constexpr):
    """A load with a mask, or with EVEN (all tiles are full) without: fewer registers."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=mask, other=other)


@triton.jit
def store_rows(base, start, stride, stop, tile, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write rows from ``start`` up to ``stop``, in the dtype of ``base``."""
    o_row = tl.arange(0, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    p_tile = base + start.to(tl.int64) * stride + (o_row[:, None] * stride + o_d[None, :])
    tile = tile.to(base.dtype.element_ty)
    tl.store(p_tile, tile, mask=(start + o_row < stop)[:, None] & (o_d < SIZE)[None, :])


@triton.jit
def key_ranges(first, last, window, MODE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the keys of queries ``first`` to ``last - 1`` change phase, in whole tiles: (edge, inside, diagonal).

    Up to ``edge`` the keys are outside every window, from ``inside`` to ``diagonal`` inside every one; in between and
    from ``diagonal`` on, MIXED. With hard gates, whose windows are short, everything from ``edge`` on is.
    """
    diagonal = first // BLOCK_N * BLOCK_N
    edge = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
    inside = tl.minimum(tl.cdiv(tl.maximum(last - window, 0), BLOCK_N) * BLOCK_N, diagonal)
    if MODE == HARD:
        inside = diagonal
    return edge, inside, diagonal


@triton.jit
def kept_ranges(p_rank, first, last, window, BLOCK_N: tl.constexpr):
    """How many gathered keys queries ``first`` to ``last - 1`` see: (all of them, in whole tiles; the last of them)."""
    seen_by_all = tl.load(p_rank + first - window, mask=first >= window, other=0)
    seen_by_last = tl.load(p_rank + last - 1 - window, mask=last - 1 >= window, other=0)
    return seen_by_all // BLOCK_N * BLOCK_N, seen_by_last


@triton.jit
def load_gate(p_gate, o_s, stop, far, MODE: tl.constexpr, PHASE: tl.constexpr):
    """log2 u of keys ``o_s``; zeros for tiles that have no gate: without soft gates, or PLAIN and not ``far``."""
    gate = tl.zeros(o_s.shape, tl.float32)
    if MODE == SOFT:
        gate = tl.load(p_gate + o_s, mask=o_s < stop, other=0.0) * LOG2E
        if PHASE == PLAIN:
            gate = tl.where(far, gate, 0.0)
    return gate


@triton.jit
def load_positions(p_positions, o_s, stop, PHASE: tl.constexpr):
    """Positions of the keys at ``o_s``: these themselves, but for gathered keys."""
    position = o_s
    if PHASE == STAIR:
        position = tl.load(p_positions + o_s, mask=o_s < stop, other=NEVER)
    return position
