"""CPU backend: PyTorch's flash kernel over chunks of the scores. Exact, O(T) memory, differentiable.

The kernel takes an additive mask and returns the log-sum-exp of each row. Queries are processed in chunks of rows; a
chunk's mask is the gate, one bias per key, except for its last c + w - 1 keys, where it depends on window and future.
Heads with a window only are computed as bands of blocks, all in one call; long sequences with hard gates gather the
kept keys first.

The soft gate's gradient needs the scores outside the window separately from those inside. So the backward pass calls
the library's over two sets of keys: the bands, and plain causal attention of ``q[w:]`` over ``k[:T - w]``. With the
log-sum-exp of the whole row passed to each, the partial gradients add up to the exact ones; ``d log u`` is a column sum
of dS, read from one extra channel (ones beside q, zeros beside k). kernels/README.md derives it.

Here N = B * Hkv, and the G = Hq / Hkv query heads that share a KV head are a separate dimension: q [N, G, T, D],
k [N, T, D].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spkv_kernels.cpu.bands import window_backward, window_forward
from spkv_kernels.cpu.compaction import compact_backward, compact_forward, compacts
from spkv_kernels.cpu.masked import causal_backward, masked_forward
from spkv_kernels.cpu.rows import Rows, gate_bias


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: tuple[int, ...],
    log_utility: Tensor | None,
    keep: Tensor | None,
    scale: float,
) -> Tensor:
    """Compute ``spkv_kernels.attention``; ``windows`` is one int per KV head, at most T.

    16-bit inputs are computed in float32: faster here below about 1,000 tokens, and the gradients stay exact.
    """
    # Split query heads by KV head: [B, Hkv, G, T, D]
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads = k.shape[1]
    gate = log_utility.to(dtype) if log_utility is not None else keep
    queries = q.to(dtype).reshape(q.shape[0], heads, -1, *q.shape[2:])
    inputs = [queries, k.to(dtype), v.to(dtype)] + ([gate] if gate is not None else [])
    # Compute heads with the same window together
    if len(set(windows)) == 1:
        return _one_window(inputs, windows[0], scale).flatten(1, 2).to(q.dtype)
    by_head = [x.unbind(1) for x in inputs]
    outs: dict[int, Tensor] = {}
    for window in sorted(set(windows)):
        members = [head for head in range(heads) if windows[head] == window]
        out = _one_window([torch.stack([x[head] for head in members], 1) for x in by_head], window, scale)
        outs.update(zip(members, out.unbind(1), strict=True))
    return torch.stack([outs[head] for head in range(heads)], 1).flatten(1, 2).to(q.dtype)


def _one_window(inputs: list[Tensor], window: int, scale: float) -> Tensor:
    """Attend from q [B, H, G, T, D] over k, v [B, H, T, D] with an optional gate [B, H, T]: [B, H, G, T, D]."""
    q, k, v, *gate = (x.flatten(0, 1).contiguous() for x in inputs)
    out: Tensor = _Attention.apply(q, k, v, gate[0] if gate else None, window, scale)  # type: ignore[no-untyped-call]
    return out.view(inputs[0].shape)


class _Attention(torch.autograd.Function):
    """Attention of heads with the same window."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float) -> Tensor:
        """Compute [N, G, T, D] from q [N, G, T, D], k, v [N, T, D] and a gate [N, T] (log u, or bool) or None."""
        length = q.shape[2]
        if window >= length:
            out, lse = masked_forward(q, k, v, None, 1, scale)
        elif gate is None:
            out, lse = window_forward(q, k, v, window, scale)
        elif compacts(gate, k, window):
            out, lse = compact_forward(q, k, v, gate, window, scale)
        else:
            out, lse = masked_forward(q, k, v, gate_bias(gate, q.dtype), window, scale)
        ctx.save_for_backward(q, k, v, gate, out, lse)
        ctx.window, ctx.scale = window, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Compute dq, dk, dv, and the gradient of a soft gate."""
        q, k, v, gate, out, lse = ctx.saved_tensors
        window, scale, needs_dgate = ctx.window, ctx.scale, ctx.needs_input_grad[3]
        rows = Rows(grad.contiguous(), q, out, lse)
        # Causal attention
        if window >= q.shape[2]:
            dq, dk, dv, _ = causal_backward(rows, k, v, None, scale, False)
            return dq, dk, dv, torch.zeros_like(gate) if needs_dgate else None, None, None
        # Hard gates over gathered keys
        if gate is not None and compacts(gate, k, window):
            return *compact_backward(rows, k, v, gate, window, scale), None, None, None
        # Keys in the window
        dq, dk, dv = window_backward(rows, k, v, window, scale)
        # Keys outside it, for the rows that have any
        dgate = None
        if gate is not None:
            num_far = q.shape[2] - window
            bias = gate_bias(gate[:, :num_far], q.dtype)
            far_dq, far_dk, far_dv, dgate = causal_backward(
                rows.at(slice(window, None)), k[:, :num_far], v[:, :num_far], bias, scale, needs_dgate
            )
            dq[:, :, window:] += far_dq
            dk[:, :num_far] += far_dk
            dv[:, :num_far] += far_dv
            dgate = F.pad(dgate, (0, window)) if dgate is not None else None
        return dq, dk, dv, dgate, None, None
