"""Reference implementation: eager attention with the full [T, T] mask, which is the oracle of the tests.

Slow, differentiable, on any device. Computes in float64 for float64 inputs and in float32 otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spkv_kernels.pages import PagedState


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: tuple[int, ...],
    log_utility: Tensor | None,
    keep: Tensor | None,
    scale: float,
    sinks: tuple[int, ...] | None,
    sink_logits: Tensor | None,
    starts: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Compute ``spkv_kernels.attention``; ``windows`` and ``sinks`` are one int per KV head, at most T."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    length, group = q.shape[2], q.shape[1] // k.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = _capped(q.to(dtype) @ keys.mT * scale, softcap)
    first = torch.zeros(1, length, dtype=torch.int64, device=q.device) if starts is None else starts
    bias = _bias(windows, sinks, first, log_utility, keep, dtype).repeat_interleave(group, dim=1)
    return (_softmax(scores + bias, sink_logits) @ values).to(q.dtype)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Limit scores softly to the range of -softcap to softcap."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _softmax(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Compute the softmax of scores [..., Hq, T, n] with learned sinks [Hq] as one more column, which is dropped."""
    if sink_logits is None:
        return torch.softmax(scores, dim=-1)
    column = sink_logits.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


def _bias(
    windows: tuple[int, ...],
    sinks: tuple[int, ...] | None,
    starts: Tensor,
    log_utility: Tensor | None,
    keep: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the bias of the scores [B or 1, Hkv, T, T]; ``starts`` is [B or 1, T].

    It is 0 in the window and at sink tokens, the gate elsewhere, and -inf for the future and other documents.
    """
    device = starts.device
    position = torch.arange(starts.shape[1], device=device)
    age = position[:, None] - position[None, :]
    # [B or 1, 1, T, T], negative for earlier documents
    after_start = (position - starts[:, :, None])[:, None]
    limit, num_sinks = (
        torch.tensor(x, device=device)[None, :, None, None]
        for x in (windows, sinks or (0,) * len(windows))
    )
    visible = (age < limit) | (after_start < num_sinks)
    outside = torch.full((), -torch.inf, dtype=dtype, device=device)
    if log_utility is not None:
        gate = log_utility.to(dtype)[:, :, None, :]
    elif keep is not None:
        gate = torch.where(keep[:, :, None, :], 0.0, outside)
    else:
        gate = outside.expand(1, 1, 1, 1)
    zero = torch.zeros((), dtype=dtype, device=device)
    return torch.where((age < 0) | (after_start < 0), outside, torch.where(visible, zero, gate))


def decode_attention(
    q: Tensor, cache: PagedState, scale: float, sink_logits: Tensor | None, softcap: float | None
) -> Tensor:
    """Compute ``spkv_kernels.decode_attention``, one sequence and head after the other."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(q)
    group = q.shape[1] // cache.num_kv_heads
    for sequence in range(cache.batch_size):
        for head in range(cache.num_kv_heads):
            k, v = (x.to(dtype) for x in cache.entries(sequence, head))
            rows = slice(head * group, (head + 1) * group)
            scores = _capped(q[sequence, rows].to(dtype) @ k.T * scale, softcap)[:, None]
            p = _softmax(scores, None if sink_logits is None else sink_logits[rows])
            out[sequence, rows] = (p[:, 0] @ v).to(q.dtype)
    return out
