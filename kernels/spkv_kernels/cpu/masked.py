"""Chunks of rows under a mask: the forward pass of gates and of causal attention, and the causal backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spkv_kernels.cpu.rows import ROWS, Rows, chunks, flash, flash_backward, per_query_head

_MASK_BYTES = 64 << 20  # of one mask; more heads than fit go one after the other


def masked_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [N, G, T, D], lse [N, G, T]); ``bias`` [N, T] is added outside the window. None and w = 1: causal."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    length = q.shape[2]
    if bias is None:
        bias = q.new_zeros(1, length)
    share = max(1, _MASK_BYTES // (min(ROWS, length) * length * q.element_size()))
    for first in range(0, q.shape[0], share if len(bias) > 1 else q.shape[0]):
        some = slice(first, first + share if len(bias) > 1 else None)
        part = bias[some].unsqueeze(1)
        mask = part.expand(-1, min(ROWS, length), -1).contiguous()
        done = 0
        for chunk in chunks(length, window):
            mask[:, :, done : chunk.edge] = part[:, :, done : chunk.edge]  # the last chunk's edge is now far away
            done = chunk.edge
            visible = mask[:, : chunk.stop - chunk.start, : chunk.stop]
            chunk.write_edge(visible[:, :, chunk.edge :], part[:, :, chunk.edge : chunk.stop], window)
            rows = q[some, :, chunk.rows]
            out[some, :, chunk.rows], lse[some, :, chunk.rows] = flash(
                rows,
                per_query_head(k[some, : chunk.stop], rows),
                per_query_head(v[some, : chunk.stop], rows),
                attn_mask=visible.unsqueeze(1).expand(*rows.shape[:3], -1),
                scale=scale,
            )
    return out, lse


def causal_backward(
    rows: Rows, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, gate: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dbias) of the S rows, of which row r sees keys 0 to r of k, v [N, S, D]; ``bias`` [N, S].

    In chunks of keys, so that the kernel, which works through 512 keys at a time, skips most of the future.
    """
    size = k.shape[2]
    if gate:  # one more column: ones beside q, so that the column of dk is scale * (column sum of dS)
        grad, q, out = (F.pad(x, (0, 1), value=float(x is rows.q)) for x in rows[:3])
        rows = Rows(grad, q, out, rows.lse)
        k, v = F.pad(k, (0, 1)), F.pad(v, (0, 1))
    length = k.shape[1]
    dq = torch.empty(0)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    step = 128 if length <= 1024 else 256
    for start in range(0, length, step):
        keys = slice(start, start + step)
        seeing = rows.at(slice(start, None))
        mask = bias[:, None, None, keys].expand(*seeing.q.shape[:3], -1) if bias is not None else None
        part, dkeys, dvalues = rows_backward(seeing, k[:, keys], v[:, keys], mask, scale, causal=True)
        if start == 0:
            dq = part
        else:
            dq[:, :, start:] += part
        torch.sum(dkeys, 1, out=dk[:, keys])
        torch.sum(dvalues, 1, out=dv[:, keys])
    if not gate:
        return dq, dk, dv, None
    return dq[..., :size], dk[..., :size], dv[..., :size], dk[..., size] / scale


def rows_backward(
    rows: Rows, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), the last two still per query head: [N, G, n, D] for k, v [N, n, D]."""
    keys, values = per_query_head(k, rows.q), per_query_head(v, rows.q)
    dq, dk, dv = flash_backward(
        rows.grad, rows.q, keys, values, rows.out, rows.lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return dq, dk, dv
