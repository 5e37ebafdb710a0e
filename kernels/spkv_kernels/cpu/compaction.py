"""Hard gates on long sequences: gather the kept keys of each head first, so that work scales with density."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spkv_kernels.cpu.masked import rows_backward
from spkv_kernels.cpu.rows import ROWS, Chunk, Rows, chunks, flash, gate_bias, per_query_head

# Minimum size of the keys outside the window, (T - w) D, for which gathering pays
_COMPACT_FROM = 1 << 14


def compacts(gate: Tensor, k: Tensor, window: int) -> bool:
    """Return whether gathering pays: the gate is hard, and enough of k [N, T, D] lies outside the window."""
    return gate.dtype == torch.bool and (k.shape[1] - window) * k.shape[2] >= _COMPACT_FROM


class _Compact(NamedTuple):
    """Kept keys of one KV head.

    Attributes:
        position: positions in ascending order.
        before: number of kept keys before each position, [T + 1].
    """

    position: Tensor
    before: list[int]

    @classmethod
    def of(cls, keep: Tensor) -> _Compact:
        """Find the kept keys by ``keep`` [T]."""
        return cls(keep.nonzero().flatten(), F.pad(keep.cumsum(0), (1, 0)).tolist())


def _compact_masks(
    keep: Tensor, window: int, compact: _Compact, dtype: torch.dtype
) -> Iterator[tuple[Chunk, int, Tensor]]:
    """Yield each chunk, the number n of kept keys before its edge, and its mask [rows, n + stop - edge].

    The mask is a view of a buffer that is reused for the next chunk.
    """
    length = keep.shape[0]
    bias = gate_bias(keep, dtype)
    mask = torch.zeros(ROWS, len(compact.position) + ROWS + window, dtype=dtype)
    for chunk in chunks(length, window):
        count = compact.before[chunk.edge]
        end = count + chunk.stop - chunk.edge
        visible = mask[: chunk.stop - chunk.start, :end]
        chunk.write_edge(visible[:, count:], bias[None, chunk.edge : chunk.stop], window)
        yield chunk, count, visible
        visible[:, count:] = 0.0


def compact_forward(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute out [N, G, T, D] and lse [N, G, T].

    Kept keys before a chunk's edge are visible to all of its rows and need no mask.
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for head in range(q.shape[0]):
        compact = _Compact.of(keep[head])
        keys, values = k[head, compact.position], v[head, compact.position]
        for chunk, count, mask in _compact_masks(keep[head], window, compact, q.dtype):
            rows = q[head : head + 1, :, chunk.rows]
            near = slice(chunk.edge, chunk.stop)
            out[head : head + 1, :, chunk.rows], lse[head : head + 1, :, chunk.rows] = flash(
                rows,
                per_query_head(torch.cat((keys[:count], k[head, near]))[None], rows),
                per_query_head(torch.cat((values[:count], v[head, near]))[None], rows),
                attn_mask=mask.expand(1, rows.shape[1], -1, -1),
                scale=scale,
            )
    return out, lse


def compact_backward(
    rows: Rows, k: Tensor, v: Tensor, keep: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq [N, G, T, D] and dk, dv [N, T, D]."""
    dq, dk, dv = torch.empty_like(rows.q), torch.zeros_like(k), torch.zeros_like(v)
    for head in range(k.shape[0]):
        # Gather the kept keys
        compact = _Compact.of(keep[head])
        keys, values = k[head, compact.position], v[head, compact.position]
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        head_rows = Rows(*(x[head : head + 1] for x in rows))
        # Accumulate gradients of kept and near keys by chunk
        for chunk, count, mask in _compact_masks(keep[head], window, compact, k.dtype):
            chunk_rows = head_rows.at(chunk.rows)
            near = slice(chunk.edge, chunk.stop)
            gradients = rows_backward(
                chunk_rows,
                torch.cat((keys[:count], k[head, near]))[None],
                torch.cat((values[:count], v[head, near]))[None],
                mask.expand(1, chunk_rows.q.shape[1], -1, -1),
                scale,
            )
            dq[head, :, chunk.rows] = gradients[0][0]
            for total, gathered, gradient in (
                (dk, dkeys, gradients[1]),
                (dv, dvalues, gradients[2]),
            ):
                summed = gradient[0].sum(0)
                gathered[:count] += summed[:count]
                total[head, near] += summed[count:]
        # Scatter gradients of kept keys
        dk[head].index_add_(0, compact.position, dkeys)
        dv[head].index_add_(0, compact.position, dvalues)
    return dq, dk, dv
