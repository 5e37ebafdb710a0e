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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spkv_kernels.cpu.bands import window_backward, window_forward
from spkv_kernels.cpu.compaction import compact_backward, compact_forward, compacts
from spkv_kernels.cpu.documents import attend_by_document
from spkv_kernels.cpu.masked import causal_backward, masked_forward
from spkv_kernels.cpu.rows import Rows, gate_bias
from spkv_kernels.cpu.softcap import capped_backward, capped_forward

_DELTA_ROWS = 512  # tokens per step of the gradient of learned sinks


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
    starts: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute ``spkv_kernels.attention``; ``windows`` and ``sinks`` are one int per KV head, at most T.

    16-bit inputs are computed in float32: faster here below about 1,000 tokens, and the gradients stay exact.
    """
    if starts is not None:

        def attend(*document: Any) -> Tensor:
            q, k, v, log_utility, keep = document
            return attention(
                q, k, v, windows, log_utility, keep, scale, sinks, sink_logits, None, softcap
            )

        out: Tensor = attend_by_document(attend, starts, (q, k, v, log_utility, keep))
        return out
    # Split query heads by KV head: [B, Hkv, G, T, D]
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads, length = k.shape[:3]
    gate = log_utility.to(dtype) if log_utility is not None else keep
    queries = q.to(dtype).reshape(batch, heads, -1, *q.shape[2:])
    logits = (
        sink_logits.reshape(1, heads, -1).expand(batch, -1, -1) if sink_logits is not None else None
    )
    inputs, gates = (queries, k.to(dtype), v.to(dtype)), (gate, logits)
    # Compute heads with the same window and sinks together; those that reach all keys are global
    kinds = [
        (w, n) if w + n < length else (length, 0)
        for w, n in zip(windows, sinks or (0,) * heads, strict=True)
    ]
    if len(set(kinds)) == 1:
        return _one_kind(inputs, gates, *kinds[0], scale, softcap).flatten(1, 2).to(q.dtype)
    by_head = [x.unbind(1) for x in inputs]
    gates_by_head = [x.unbind(1) if x is not None else None for x in gates]
    outs: dict[int, Tensor] = {}
    for kind in sorted(set(kinds)):
        members = [head for head in range(heads) if kinds[head] == kind]
        some = [torch.stack([x[head] for head in members], 1) for x in by_head]
        some_gates = [
            torch.stack([x[head] for head in members], 1) if x is not None else None
            for x in gates_by_head
        ]
        outs.update(
            zip(members, _one_kind(some, some_gates, *kind, scale, softcap).unbind(1), strict=True)
        )
    return torch.stack([outs[head] for head in range(heads)], 1).flatten(1, 2).to(q.dtype)


def _one_kind(
    inputs: Sequence[Tensor],
    gates: Sequence[Tensor | None],
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attend with one window and number of sink tokens: [B, H, G, T, D].

    Args:
        inputs: q [B, H, G, T, D] and k, v [B, H, T, D].
        gates: log u or bool [B, H, T], and learned sinks [B, H, G]; each may be None.
        window: w.
        sinks: number of sink tokens; w + sinks < T unless it is 0.
        scale: scale of the scores.
        softcap: cap of the scores, or None.
    """
    q, k, v = (x.flatten(0, 1).contiguous() for x in inputs)
    gate, logits = (x.flatten(0, 1).contiguous() if x is not None else None for x in gates)
    # Gates keep the sink tokens, also where the bands would take more memory for sinks than for windows
    if sinks and (gate is not None or sinks > window):
        is_sink = torch.arange(k.shape[1], device=k.device) < sinks
        if gate is None:
            gate = is_sink.repeat(len(k), 1)
        else:
            gate = gate | is_sink if gate.dtype == torch.bool else gate.masked_fill(is_sink, 0.0)
        sinks = 0
    out: Tensor = _Attention.apply(q, k, v, gate, logits, window, sinks, scale, softcap)  # type: ignore[no-untyped-call]
    return out.view(inputs[0].shape)


class _Attention(torch.autograd.Function):
    """Attention of heads with the same window and sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None,
        logits: Tensor | None,
        window: int,
        sinks: int,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Compute [N, G, T, D] from q [N, G, T, D] and k, v [N, T, D].

        The gate is [N, T] (log u, or bool), and learned sinks are [N, G]. With a gate, ``sinks`` is 0.
        """
        length = q.shape[2]
        if softcap is not None:
            out, lse = capped_forward(q, k, v, gate, window, sinks, scale, softcap)
        elif window >= length:
            out, lse = masked_forward(q, k, v, None, 1, scale)
        elif gate is None:
            out, lse = window_forward(q, k, v, window, sinks, scale)
        elif compacts(gate, k, window):
            out, lse = compact_forward(q, k, v, gate, window, scale)
        else:
            out, lse = masked_forward(q, k, v, gate_bias(gate, q.dtype), window, scale)
        if logits is not None:
            total = torch.logaddexp(lse, logits[..., None])
            out.mul_(torch.exp(lse - total).unsqueeze(-1))
            lse = total
        ctx.save_for_backward(q, k, v, gate, logits, out, lse)
        ctx.window, ctx.sinks, ctx.scale, ctx.softcap = window, sinks, scale, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Compute dq, dk, dv, and the gradients of a soft gate and of learned sinks."""
        q, k, v, gate, logits, out, lse = ctx.saved_tensors
        rows = Rows(grad.contiguous(), q, out, lse)
        dlogits = None
        if ctx.needs_input_grad[4]:
            # delta = <dout, out>, in parts that stay in the caches
            parts = zip(*(torch.split(x, _DELTA_ROWS, 2) for x in (rows.grad, out)), strict=True)
            delta = torch.cat([(x * y).sum(-1) for x, y in parts], 2)
            dlogits = -(torch.exp(logits[..., None] - lse) * delta).sum(-1)
        backward: Callable[..., Any] = _keys_backward
        options = (ctx.window, ctx.sinks, ctx.scale)
        if ctx.softcap is not None:
            backward = partial(capped_backward, softcap=ctx.softcap)
        gradients = backward(rows, k, v, gate, *options, needs_dgate=ctx.needs_input_grad[3])
        return *gradients, dlogits, None, None, None, None


def _keys_backward(
    rows: Rows,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    window: int,
    sinks: int,
    scale: float,
    needs_dgate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute dq [N, G, T, D], dk, dv [N, T, D], and the gradient of a soft gate [N, T] if it needs one."""
    # Causal attention
    if window >= rows.q.shape[2]:
        dq, dk, dv, _ = causal_backward(rows, k, v, None, scale, False)
        return dq, dk, dv, torch.zeros_like(gate) if gate is not None and needs_dgate else None
    # Hard gates over gathered keys
    if gate is not None and compacts(gate, k, window):
        return *compact_backward(rows, k, v, gate, window, scale), None
    # Keys in the window, and sink tokens
    dq, dk, dv = window_backward(rows, k, v, window, sinks, scale)
    # Keys outside it, for the rows that have any
    dgate = None
    if gate is not None:
        num_far = rows.q.shape[2] - window
        bias = gate_bias(gate[:, :num_far], k.dtype)
        far_dq, far_dk, far_dv, dgate = causal_backward(
            rows.at(slice(window, None)), k[:, :num_far], v[:, :num_far], bias, scale, needs_dgate
        )
        dq[:, :, window:] += far_dq
        dk[:, :num_far] += far_dk
        dv[:, :num_far] += far_dv
        dgate = F.pad(dgate, (0, window)) if dgate is not None else None
    return dq, dk, dv, dgate
