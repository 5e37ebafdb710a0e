"""Masked attention in chunks of rows: forward pass of gates and causal attention, and causal backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spkv_kernels.cpu.rows import ROWS, Rows, chunks, flash, flash_backward, per_query_head

_MASK_BYTES = 64 << 20  # maximum size of a mask; heads that exceed it are split


def masked_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute out [N, G, T, D] and lse [N, G, T] with ``bias`` [N, T] added outside the window.

    Without a bias and with w = 1 it is causal attention.
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    length = q.shape[2]
    if bias is None:
        bias = q.new_zeros(1, length)
    # Limit the mask to as many heads as fit
    heads_at_once = max(1, _MASK_BYTES // (min(ROWS, length) * length * q.element_size()))
    for first in range(0, q.shape[0], heads_at_once if len(bias) > 1 else q.shape[0]):
        heads = slice(first, first + heads_at_once if len(bias) > 1 else None)
        head_bias = bias[heads].unsqueeze(1)
        mask = head_bias.expand(-1, min(ROWS, length), -1).contiguous()
        written = 0
        # Update the mask from chunk to chunk, and attend
        for chunk in chunks(length, window):
            # The previous edge is outside all windows now
            mask[:, :, written : chunk.edge] = head_bias[:, :, written : chunk.edge]
            written = chunk.edge
            visible = mask[:, : chunk.stop - chunk.start, : chunk.stop]
            chunk.write_edge(
                visible[:, :, chunk.edge :], head_bias[:, :, chunk.edge : chunk.stop], window
            )
            rows = q[heads, :, chunk.rows]
            out[heads, :, chunk.rows], lse[heads, :, chunk.rows] = flash(
                rows,
                per_query_head(k[heads, : chunk.stop], rows),
                per_query_head(v[heads, : chunk.stop], rows),
                attn_mask=visible.unsqueeze(1).expand(*rows.shape[:3], -1),
                scale=scale,
            )
    return out, lse


def causal_backward(
    rows: Rows, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, gate: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute dq, dk, dv, dbias of S rows, of which row r sees keys 0 to r of k, v [N, S, D]; ``bias`` is [N, S].

    Keys are processed in chunks, so that the kernel, which handles 512 keys at a time, skips most of the future.
    ``gate`` requests dbias.
    """
    size = k.shape[2]
    if gate:  # an extra channel with ones in q: its dk is scale * (column sum of dS)
        grad, q, out = (F.pad(x, (0, 1), value=float(x is rows.q)) for x in rows[:3])
        rows = Rows(grad, q, out, rows.lse)
        k, v = F.pad(k, (0, 1)), F.pad(v, (0, 1))
    # Sum over chunks of keys, each with the rows that see it
    length = k.shape[1]
    dq = torch.empty(0)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    step = 128 if length <= 1024 else 256
    for start in range(0, length, step):
        keys = slice(start, start + step)
        visible_rows = rows.at(slice(start, None))
        mask = (
            bias[:, None, None, keys].expand(*visible_rows.q.shape[:3], -1)
            if bias is not None
            else None
        )
        chunk_dq, dkeys, dvalues = rows_backward(
            visible_rows, k[:, keys], v[:, keys], mask, scale, causal=True
        )
        if start == 0:
            dq = chunk_dq
        else:
            dq[:, :, start:] += chunk_dq
        torch.sum(dkeys, 1, out=dk[:, keys])
        torch.sum(dvalues, 1, out=dv[:, keys])
    if not gate:
        return dq, dk, dv, None
    return dq[..., :size], dk[..., :size], dv[..., :size], dk[..., size] / scale


def rows_backward(
    rows: Rows, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk, dv, the latter two still per query head: [N, G, n, D] for k, v [N, n, D]."""
    keys, values = per_query_head(k, rows.q), per_query_head(v, rows.q)
    dq, dk, dv = flash_backward(
        rows.grad,
        rows.q,
        keys,
        values,
        rows.out,
        rows.lse,
        0.0,
        causal,
        attn_mask=mask,
        scale=scale,
    )
    return dq, dk, dv
