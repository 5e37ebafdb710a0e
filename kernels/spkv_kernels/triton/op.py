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
from spkv_kernels.triton.common import HARD, NONE, SOFT
from spkv_kernels.triton.compaction import compact
from spkv_kernels.triton.config import LARGEST_BLOCK, launch_options, tunable

_LOG2E = math.log2(math.e)
_NO_KEPT = (None,) * 4

_fwd = tunable("fwd", forward.attention_fwd_kernel)
_bwd_dq = tunable("bwd_dq", backward.attention_bwd_dq_kernel)
_bwd_dkdv = tunable("bwd_dkdv", backward.attention_bwd_dkdv_kernel)
_bwd_far_dkdv = tunable("bwd_dkdv", backward.attention_bwd_far_dkdv_kernel)


@torch.library.custom_op("spkv::attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, windows: Tensor, log_utility: Tensor | None, keep: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the output, shaped as q, and the base-2 log-sum-exp [B, Hq, T] in float32."""
    q, k, v = (_dense_rows(x) for x in (q, k, v))
    out = _tokens_first(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    shape = _Shape(q, k, log_utility, keep)
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
    q: Tensor, k: Tensor, v: Tensor, windows: Tensor, log_utility: Tensor | None, keep: Tensor | None, scale: float
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute dq, dk, dv, and d log u [B, Hkv, T] in float32, which is empty without soft gates."""
    # Allocate outputs
    q, k, v, grad = (_dense_rows(x) for x in (q, k, v, grad))
    dq, dk, dv = (_tokens_first(x) for x in (q, k, v))
    delta = torch.empty_like(lse)
    dgate = lse.new_empty(log_utility.shape if log_utility is not None else 0)
    gate = _contiguous(log_utility)
    far = compact(k, v, keep) if keep is not None else None
    shape = _Shape(q, k, log_utility, keep)
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]]
    # dq, and delta = <dout, out>
    _bwd_dq[shape.grid("BLOCK_M", len(q) * q.shape[1])](
        q,
        k,
        v,
        gate,
        *(far or _NO_KEPT),
        windows,
        out,
        lse,
        grad,
        delta,
        dq,
        *strides,
        *grad.stride()[:3],
        scale * _LOG2E,
        **shape.arguments,
        **launch_options("bwd_dq", shape.size, q.dtype),
    )
    # dk and dv of gathered keys, from queries outside the window
    far_dk = far_dv = kept = None
    if keep is not None and far is not None:
        kept = keep.contiguous().view(torch.uint8)
        far_dk, far_dv = (x.new_empty(x.shape, dtype=torch.float32) for x in (far.k, far.v))
        _bwd_far_dkdv[shape.grid("BLOCK_N", len(k) * k.shape[1])](
            q,
            *far,
            windows,
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
    return dq, dk, dv, dgate


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_tokens_first(x) for x in (q, k, v))
    return dq, dk, dv, lse.new_empty(log_utility.shape if log_utility is not None else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors that the backward pass needs."""
    *tensors, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.scale = scale


def _autograd(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradients of all inputs."""
    q, k, v, windows, log_utility, keep, out, lse = ctx.saved_tensors
    dq, dk, dv, dgate = _backward(grad, q, k, v, windows, log_utility, keep, out, lse, ctx.scale)
    return dq, dk, dv, None, dgate.to(log_utility.dtype) if log_utility is not None else None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


class _Shape:
    """Arguments that all launches of one call share."""

    def __init__(self, q: Tensor, k: Tensor, log_utility: Tensor | None, keep: Tensor | None) -> None:
        self.size = q.shape[3]
        self.length = q.shape[2]
        mode = SOFT if log_utility is not None else HARD if keep is not None else NONE
        self.even = self.length % LARGEST_BLOCK == 0
        self.arguments: dict[str, Any] = {
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
) -> Tensor:
    """Compute ``spkv_kernels.attention``; ``windows`` and ``sinks`` are int32 [Hkv] on the device of ``q``.

    Raises:
        ValueError: there are sink tokens or learned sinks, which these kernels do not support.
    """
    if sinks is not None or sink_logits is not None:
        raise ValueError("sinks, sink_logits: backend 'triton' supports no sinks; use backend 'cpu' or 'reference'")
    out: Tensor = _forward(q, k, v, windows, log_utility, keep, scale)[0]
    return out
