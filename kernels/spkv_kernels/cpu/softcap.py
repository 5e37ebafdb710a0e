"""Soft-capped scores, which PyTorch's flash kernel cannot compute: torch operations on chunks of query rows.

A chunk gathers the keys that its windows, sink tokens or gates reach. Scores are computed again in the backward pass,
so that memory is O(T); kernels/README.md has the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spkv_kernels.cpu.rows import Rows, chunks, gate_bias


def capped_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    window: int,
    sinks: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Compute out [N, G, T, D] and lse [N, G, T]."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for rows, keys, bias, _ in _chunks(k, gate, window, sinks):
        scores = (
            _by_group(q[:, :, rows], k[:, keys].mT)
            .mul_(scale / softcap)
            .tanh_()
            .mul_(softcap)
            .add_(bias)
        )
        lse[:, :, rows] = scores.logsumexp(-1)
        out[:, :, rows] = _by_group(scores.sub_(lse[:, :, rows, None]).exp_(), v[:, keys])
    return out, lse


def capped_backward(
    rows: Rows,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    window: int,
    sinks: int,
    scale: float,
    softcap: float,
    needs_dgate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute dq [N, G, T, D], dk, dv [N, T, D], and the gradient of a soft gate [N, T] if it needs one."""
    dq, dk, dv = torch.empty_like(rows.q), torch.zeros_like(k), torch.zeros_like(v)
    dgate = torch.zeros_like(gate) if gate is not None and needs_dgate else None
    for some, keys, bias, is_far in _chunks(k, gate, window, sinks):
        # Compute the probabilities and dS again
        grad, q, out, lse = rows.at(some)
        tanh = _by_group(q, k[:, keys].mT).mul_(scale / softcap).tanh_()
        p = (tanh * softcap).add_(bias).sub_(lse[..., None]).exp_()
        ds = _by_group(grad, v[:, keys].mT).sub_((grad * out).sum(-1, keepdim=True)).mul_(p)
        if dgate is not None:
            dgate.index_add_(1, keys, ds.masked_fill(~is_far, 0.0).sum((1, 2)))
        # Multiply by the slope of the cap, and sum over the queries of each key
        ds.mul_(tanh.square_().neg_().add_(1.0)).mul_(scale)
        dq[:, :, some] = _by_group(ds, k[:, keys])
        dk.index_add_(1, keys, ds.flatten(1, 2).mT @ q.flatten(1, 2))
        dv.index_add_(1, keys, p.flatten(1, 2).mT @ grad.flatten(1, 2))
    return dq, dk, dv, dgate


def _chunks(
    k: Tensor, gate: Tensor | None, window: int, sinks: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield the rows of each chunk, the keys they reach, the bias [N or 1, 1, rows, keys], and keys outside windows.

    The last is bool [rows, keys]. A hard gate reaches the keys that any of the N heads keeps.
    """
    position = torch.arange(k.shape[1], device=k.device)
    outside = gate_bias((position < sinks)[None] if gate is None else gate, k.dtype)
    is_hard = gate is not None and gate.dtype == torch.bool
    far = (
        torch.isfinite(outside).any(0).nonzero().flatten()
        if is_hard
        else position[: sinks if gate is None else None]
    )
    for chunk in chunks(k.shape[1], window):
        num_far = int((far < chunk.edge).sum()) if is_hard else chunk.edge
        keys = torch.cat([far[:num_far], position[chunk.edge : chunk.stop]])
        age = position[chunk.rows, None] - keys
        bias = torch.where(age < window, 0.0, outside[:, None, keys]).masked_fill_(
            age < 0, -torch.inf
        )
        yield chunk.rows, keys, bias.unsqueeze(1), age >= window


def _by_group(x: Tensor, y: Tensor) -> Tensor:
    """Multiply [N, G, S, n] by [N, n, m], which the G heads of a group share."""
    return (x.flatten(1, 2) @ y).view(*x.shape[:3], -1)
