"""Parts that forward and backward kernels share: gate modes, phases of the inner loop, and the bias of a score tile.

Scores are in base 2 inside the kernels: the scale and ``log u`` are multiplied by log2(e), and exponentials are
``exp2``.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Gate modes
NONE = tl.constexpr(0)
SOFT = tl.constexpr(1)
HARD = tl.constexpr(2)

# Phases: the score tiles that a loop visits
PLAIN = tl.constexpr(0)  # inside the window of every query, or outside of all (soft gates): no mask
MIXED = tl.constexpr(1)  # future, window and older keys, distinguished by position
KEPT = tl.constexpr(2)  # gathered keys outside the window of every query: no mask
STAIR = tl.constexpr(3)  # gathered keys, or sink tokens, outside the window of some queries

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(1 << 30)  # position of a key that no query sees
SINKS = tl.constexpr(16)  # sink tokens in a tile: the fewest keys that a product takes


@triton.jit
def add_bias(scores, query, key, left, gate, MODE: tl.constexpr, PHASE: tl.constexpr):
    """Add the operator's bias to a tile of scores.

    ``query`` and ``key`` are positions, ``left`` = key + window is the first query whose window the key has left, and
    ``gate`` is log u, or zero in a PLAIN tile inside the window; all broadcast to the tile.
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
def cap_scores(scores, softcap):
    """Compute softcap * tanh(scores / softcap); both are in base 2."""
    return softcap - 2 * softcap / (tl.exp2(scores * (2 * LOG2E / softcap)) + 1)


@triton.jit
def cap_slope(capped, softcap):
    """Compute the derivative of ``cap_scores`` from its result."""
    return 1 - (capped / softcap) * (capped / softcap)


@triton.jit
def load_rows(
    base,
    start,
    stride,
    stop,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Load rows from ``start`` of a [*, SIZE] matrix as [BLOCK, BLOCK_D].

    Channels beyond SIZE are zero, and with ROWS also rows from ``stop`` on. The offset of the tile is 64 bits wide,
    those within it need 32.
    """
    o_row = tl.arange(0, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    p_tile = base + start.to(tl.int64) * stride + (o_row[:, None] * stride + o_d[None, :])
    if ROWS:
        return tl.load(
            p_tile, mask=(start + o_row < stop)[:, None] & (o_d < SIZE)[None, :], other=0.0
        )
    if SIZE != BLOCK_D:
        return tl.load(p_tile, mask=(o_d < SIZE)[None, :], other=0.0)
    return tl.load(p_tile)


@triton.jit
def load_values(pointers, mask, other, EVEN: tl.constexpr):
    """Load with a mask, or without one if EVEN (all tiles are full), which needs fewer registers."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=mask, other=other)


@triton.jit
def store_rows(
    base, start, stride, stop, tile, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store rows from ``start`` up to ``stop``, in the dtype of ``base``."""
    o_row = tl.arange(0, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    p_tile = base + start.to(tl.int64) * stride + (o_row[:, None] * stride + o_d[None, :])
    tile = tile.to(base.dtype.element_ty)
    tl.store(p_tile, tile, mask=(start + o_row < stop)[:, None] & (o_d < SIZE)[None, :])


@triton.jit
def key_ranges(first, last, window, oldest, newest, MODE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return where the keys of queries ``first`` to ``last - 1`` change phase, in whole tiles.

    The documents of the queries start from ``oldest`` to ``newest``. Keys before ``start`` are in none of them. Keys
    before ``edge`` are outside every window, those from ``inside`` to ``diagonal`` inside every one. Tiles between
    ``edge`` and ``inside``, and from ``diagonal`` on, are MIXED. With hard gates, whose windows are short, all tiles
    from ``edge`` on are.
    """
    diagonal = first // BLOCK_N * BLOCK_N
    start = oldest // BLOCK_N * BLOCK_N
    edge = tl.maximum(first - window + 1, oldest) // BLOCK_N * BLOCK_N
    inside = tl.minimum(tl.cdiv(tl.maximum(last - window, newest), BLOCK_N) * BLOCK_N, diagonal)
    if MODE == HARD:
        inside = diagonal
    return start, edge, inside, diagonal


@triton.jit
def kept_ranges(p_rank, first, last, window, oldest, BLOCK_N: tl.constexpr):
    """Return which gathered keys queries ``first`` to ``last - 1`` see, whose documents start from ``oldest`` on.

    Those before the first number are in none of their documents; those before the second have left the windows of all
    of them, and those before the third that of the last one. The first two are rounded down to whole tiles.
    """
    earlier = tl.load(p_rank + oldest - 1, mask=oldest > 0, other=0) // BLOCK_N * BLOCK_N
    seen_by_all = tl.load(p_rank + first - window, mask=first >= window, other=0)
    seen_by_last = tl.load(p_rank + last - 1 - window, mask=last - 1 >= window, other=0)
    return earlier, tl.maximum(seen_by_all // BLOCK_N * BLOCK_N, earlier), seen_by_last


@triton.jit
def load_gate(p_gate, o_s, stop, far, MODE: tl.constexpr, PHASE: tl.constexpr):
    """Load log2 u of keys ``o_s``; zeros without soft gates, and in PLAIN tiles that are not ``far``."""
    gate = tl.zeros(o_s.shape, tl.float32)
    if MODE == SOFT:
        gate = tl.load(p_gate + o_s, mask=o_s < stop, other=0.0) * LOG2E
        if PHASE == PLAIN:
            gate = tl.where(far, gate, 0.0)
    return gate


@triton.jit
def load_positions(p_positions, o_s, stop, b_start, PHASE: tl.constexpr):
    """Return the positions of the keys at ``o_s``, which differ from ``o_s`` for gathered keys.

    Where all queries see all gathered keys (KEPT, one document per row), they are not needed.
    """
    position = o_s
    if PHASE == STAIR or (PHASE == KEPT and b_start is not None):
        if p_positions is None:  # sink tokens are at the start of the sequence
            position = tl.where(o_s < stop, o_s, NEVER)
        else:
            position = tl.load(p_positions + o_s, mask=o_s < stop, other=NEVER)
    return position
