"""Torch operators ``spkv::attention`` and ``spkv::attention_backward``, which launch the kernels.

They are registered with torch.library, so that ``torch.compile(fullgraph=True)`` and activation checkpointing see one
opaque operator with known shapes, and autograd knows its backward pass. Nothing here synchronises with the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from spkv_kernels.triton import backward, forward
from spkv_kernels.triton.common import HARD, NONE, SINKS, SOFT
from spkv_kernels.triton.compaction import compact
from spkv_kernels.triton.config import LARGEST_BLOCK, block_m, launch_options, smallest_block_m, tunable
from spkv_kernels.triton.sinks import attention_bwd_sink_sum_kernel

_LOG2E = math.log2(math.e)
_NO_KEPT = (None,) * 4

_fwd = tunable("fwd", forward.attention_fwd_kernel)
_bwd_dq = tunable("bwd_dq", backward.attention_bwd_dq_kernel)
_bwd_dkdv = tunable("bwd_dkdv", backward.attention_bwd_dkdv_kernel)
_bwd_far_dkdv = tunable("bwd_dkdv", backward.attention_bwd_far_dkdv_kernel)


@torch.library.custom_op("spkv::attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Tensor,
    log_utility: Tensor | None,
    keep: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    sink_logits: Tensor | None = None,
    starts: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the output, shaped as q, and the base-2 log-sum-exp [B, Hq, T] in float32.

    The latter includes the learned sinks. ``sinks`` needs a call without gates and ``starts``.
    """
    q, k, v = (_dense_rows(x) for x in (q, k, v))
    out = _tokens_first(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    shape = _Shape(q, k, log_utility, keep, softcap)
    # Triton launches on the current device, which autograd sets in a backward pass
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        far = compact(k, v, keep) if keep is not None else _NO_KEPT
        _fwd[shape.grid("BLOCK_M", len(q) * q.shape[1])](
            q,
            k,
            v,
            _contiguous(log_utility),
            *far,
            windows,
            sinks,
            sink_logits,
            starts,
            out,
            lse,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            scale * _LOG2E,
            **shape.arguments,
            **launch_options("fwd", shape.size, q.dtype),
        )
    return out, lse


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Tensor,
    log_utility: Tensor | None,
    keep: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    sink_logits: Tensor | None = None,
    starts: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    return _tokens_first(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("spkv::attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Tensor,
    log_utility: Tensor | None,
    keep: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    sinks: Tensor | None,
    sink_logits: Tensor | None,
    starts: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute dq, dk, dv, d log u [B, Hkv, T] and d sink_logits [Hq].

    The last two are float32, and empty without soft gates or learned sinks.
    """
    # Allocate outputs
    q, k, v, grad = (_dense_rows(x) for x in (q, k, v, grad))
    dq, dk, dv = (_tokens_first(x) for x in (q, k, v))
    delta = torch.empty_like(lse)
    dgate = lse.new_empty(log_utility.shape if log_utility is not None else 0)
    gate = _contiguous(log_utility)
    far = compact(k, v, keep) if keep is not None else None
    shape = _Shape(q, k, log_utility, keep, softcap)
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]]
    far_dk, far_dv, part_dk, part_dv = _sink_buffers(q, k, sinks)
    # dq, and delta = <dout, out>
    _bwd_dq[shape.grid("BLOCK_M", len(q) * q.shape[1])](
        q,
        k,
        v,
        gate,
        *(far or _NO_KEPT),
        windows,
        sinks,
        starts,
        out,
        lse,
        grad,
        delta,
        dq,
        part_dk,
        part_dv,
        *strides,
        *grad.stride()[:3],
        scale * _LOG2E,
        **shape.arguments,
        **launch_options("bwd_dq", shape.size, q.dtype),
    )
    ends = _ends(starts)
    # dk and dv of gathered keys, from queries outside the window
    kept = None
    if keep is not None and far is not None:
        kept = keep.contiguous().view(torch.uint8)
        far_dk, far_dv = (x.new_empty(x.shape, dtype=torch.float32) for x in (far.k, far.v))
        _bwd_far_dkdv[shape.grid("BLOCK_N", len(k) * k.shape[1])](
            q,
            *far,
            windows,
            ends,
            lse,
            grad,
            delta,
            far_dk,
            far_dv,
            *q.stride()[:3],
            *grad.stride()[:3],
            scale * _LOG2E,
            **shape.arguments,
            EVEN=shape.even,
            **launch_options("bwd_dkdv", shape.size, q.dtype),
        )
    # dk and dv of sink tokens, from queries outside the window
    if sinks is not None:
        attention_bwd_sink_sum_kernel[(SINKS.value * len(k) * k.shape[1],)](
            part_dk,
            part_dv,
            windows,
            sinks,
            far_dk,
            far_dv,
            shape.length,
            k.shape[1],
            GROUP=q.shape[1] // k.shape[1],
            SIZE=shape.size,
            BLOCK_M=block_m(_bwd_dq, "bwd_dq", shape.size, q.dtype),
            BLOCK_D=shape.arguments["BLOCK_D"],
        )
    # dk, dv and d log u
    _bwd_dkdv[shape.grid("BLOCK_N", len(k) * k.shape[1])](
        q,
        k,
        v,
        gate,
        kept,
        far_dk,
        far_dv,
        windows,
        sinks,
        ends,
        lse,
        grad,
        delta,
        dk,
        dv,
        dgate,
        *strides,
        *grad.stride()[:3],
        scale * _LOG2E,
        **shape.arguments,
        EVEN=shape.even,
        **launch_options("bwd_dkdv", shape.size, q.dtype),
    )
    dsink = lse.new_empty(0)
    if sink_logits is not None:
        dsink = -(torch.exp2(sink_logits[:, None] * _LOG2E - lse) * delta).sum((0, 2))
    return dq, dk, dv, dgate, dsink


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Tensor,
    log_utility: Tensor | None,
    keep: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    sinks: Tensor | None,
    sink_logits: Tensor | None,
    starts: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_tokens_first(x) for x in (q, k, v))
    dgate = lse.new_empty(log_utility.shape if log_utility is not None else 0)
    return dq, dk, dv, dgate, lse.new_empty(sink_logits.shape if sink_logits is not None else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors that the backward pass needs."""
    *tensors, ctx.scale, sinks, sink_logits, starts, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, sinks, sink_logits, starts, *output)


def _autograd(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradients of all inputs."""
    q, k, v, windows, log_utility, keep, sinks, sink_logits, starts, out, lse = ctx.saved_tensors
    dq, dk, dv, dgate, dsink = _backward(
        grad, q, k, v, windows, log_utility, keep, out, lse, ctx.scale, sinks, sink_logits, starts, ctx.softcap
    )
    gate_grad = dgate.to(log_utility.dtype) if log_utility is not None else None
    return dq, dk, dv, None, gate_grad, None, None, None, dsink if sink_logits is not None else None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


class _Shape:
    """Arguments that all launches of one call share."""

    def __init__(
        self, q: Tensor, k: Tensor, log_utility: Tensor | None, keep: Tensor | None, softcap: float | None
    ) -> None:
        self.size = q.shape[3]
        self.length = q.shape[2]
        mode = SOFT if log_utility is not None else HARD if keep is not None else NONE
        self.even = self.length % LARGEST_BLOCK == 0
        self.arguments: dict[str, Any] = {
            "softcap": None if softcap is None else softcap * _LOG2E,
            "length": self.length,
            "heads": k.shape[1],
            "GROUP": q.shape[1] // k.shape[1],
            "MODE": mode.value,
            "SIZE": self.size,
            "BLOCK_D": max(16, triton.next_power_of_2(self.size)),
        }

    def grid(self, block: str, rows: int) -> Any:
        """Return the launch grid: tiles of ``block`` tokens times ``rows`` heads."""
        return lambda meta: (triton.cdiv(self.length, meta[block]) * rows,)


def _sink_buffers(q: Tensor, k: Tensor, sinks: Tensor | None) -> tuple[Tensor | None, ...]:
    """Allocate dk and dv of sink tokens, float32: sums [B * Hkv, SINKS, D], and parts [B * Hq, blocks, SINKS, D]."""
    if sinks is None:
        return (None,) * 4
    batch, query_heads, length, size = q.shape
    blocks = triton.cdiv(length, smallest_block_m("bwd_dq", size, q.dtype))
    sums, parts = (batch * k.shape[1], SINKS.value, size), (batch * query_heads, blocks, SINKS.value, size)
    return tuple(q.new_empty(shape, dtype=torch.float32) for shape in (sums, sums, parts, parts))


def _ends(starts: Tensor | None) -> Tensor | None:
    """Return the position after the document of each token, int32 [B, T], from where documents start."""
    if starts is None:
        return None
    positions = torch.arange(starts.shape[1], dtype=torch.int32, device=starts.device).expand_as(starts)
    return torch.searchsorted(starts, positions.contiguous(), right=True, out_int32=True)


def _dense_rows(x: Tensor) -> Tensor:
    """Return ``x``, copied unless D is contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _tokens_first(x: Tensor) -> Tensor:
    """Make an empty tensor [B, H, T, D] with the memory layout [B, T, H, D], which its neighbours in a model use."""
    batch, heads, length, size = x.shape
    return x.new_empty(batch, length, heads, size).transpose(1, 2)


def _contiguous(log_utility: Tensor | None) -> Tensor | None:
    """Convert log u to contiguous float32."""
    return None if log_utility is None else log_utility.to(torch.float32).contiguous()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Tensor,
    log_utility: Tensor | None,
    keep: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    sink_logits: Tensor | None,
    starts: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute ``spkv_kernels.attention``; ``windows`` and ``sinks`` are int32 [Hkv] on the device of ``q``.

    ``sink_logits`` is float32 [Hq].
    """
    if starts is not None:
        starts = starts.to(torch.int32).contiguous()
    # Gates of sink tokens are open, so the kernels of gated attention need not know them, nor those of documents
    if sinks is not None and (log_utility is not None or keep is not None or starts is not None):
        positions = torch.arange(q.shape[2], device=q.device)
        after_start = positions[None] if starts is None else positions - starts
        is_sink = after_start[:, None] < sinks[:, None]  # [B or 1, Hkv, T]
        if log_utility is not None:
            log_utility = log_utility.masked_fill(is_sink, 0.0)
        else:
            keep = is_sink.expand(len(q), -1, -1) if keep is None else keep | is_sink
        sinks = None
    out: Tensor = _forward(q, k, v, windows, log_utility, keep, scale, sinks, sink_logits, starts, softcap)[0]
    return out
