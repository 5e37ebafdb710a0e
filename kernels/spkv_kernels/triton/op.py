"""Torch operators ``spkv::attention`` and ``spkv::attention_backward``, which launch the kernels.

They are registered with torch.library, so that ``torch.compile(fullgraph=True)`` and activation checkpointing see one
opaque operator with known shapes, and autograd knows its backward pass. Nothing here synchronises with the device. As
short sequences wait for the host, what launches have in common is computed once for each shape.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from spkv_kernels.triton import backward, forward
from spkv_kernels.triton.common import HARD, NONE, SINKS, SOFT
from spkv_kernels.triton.compaction import compact
from spkv_kernels.triton.config import (
    LARGEST_BLOCK,
    block_m,
    launch_options,
    smallest_block_m,
    tunable,
)
from spkv_kernels.triton.sinks import attention_bwd_sink_sum_kernel

_LOG2E = math.log2(math.e)
_NO_KEPT = _NO_BUFFERS = (None,) * 4
_NONE, _SOFT, _HARD = NONE.value, SOFT.value, HARD.value

_fwd = tunable("fwd", forward.attention_fwd_kernel)
_bwd_dq = tunable("bwd_dq", backward.attention_bwd_dq_kernel)
_bwd_dkdv = tunable("bwd_dkdv", backward.attention_bwd_dkdv_kernel)
_bwd_far_dkdv = tunable("bwd_dkdv", backward.attention_bwd_far_dkdv_kernel)


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

    The latter includes the learned sinks. ``log_utility`` is contiguous float32. ``sinks`` needs a call without gates
    and ``starts``.
    """
    (q, q_strides), (k, k_strides), (v, v_strides) = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    out = _tokens_first(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    plan = _plan_of(q, k, log_utility, keep, softcap)
    # Triton launches on the current device, which autograd sets in a backward pass
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        far = compact(k, v, keep, plan.block_d) if keep is not None else _NO_KEPT
        _fwd[plan.fwd_grid](
            q,
            k,
            v,
            log_utility,
            *far,
            windows,
            sinks,
            sink_logits,
            starts,
            out,
            lse,
            *q_strides,
            *k_strides,
            *v_strides,
            scale * _LOG2E,
            **plan.fwd,
        )
    return out, lse


def _fake_forward(
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
    (q, q_strides), (k, k_strides), (v, v_strides) = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    grad, grad_strides = _dense_rows(grad)
    dq, dk, dv = _tokens_first(q), _tokens_first(k), _tokens_first(v)
    delta = torch.empty_like(lse)
    dgate = lse.new_empty(log_utility.shape if log_utility is not None else 0)
    plan = _plan_of(q, k, log_utility, keep, softcap)
    far = compact(k, v, keep, plan.block_d) if keep is not None else None
    strides = (*q_strides, *k_strides, *v_strides, *grad_strides)
    far_dk, far_dv, part_dk, part_dv = _NO_BUFFERS if sinks is None else _sink_buffers(q, k)
    # dq, and delta = <dout, out>
    _bwd_dq[plan.dq_grid](
        q,
        k,
        v,
        log_utility,
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
        scale * _LOG2E,
        **plan.dq,
    )
    ends = None if starts is None else _ends(starts)
    # dk and dv of gathered keys, from queries outside the window
    kept = None
    if keep is not None and far is not None:
        kept = keep.contiguous().view(torch.uint8)
        far_dk, far_dv = (x.new_empty(x.shape, dtype=torch.float32) for x in (far.k, far.v))
        _bwd_far_dkdv[plan.dkdv_grid](
            q,
            *far,
            windows,
            ends,
            lse,
            grad,
            delta,
            far_dk,
            far_dv,
            *q_strides,
            *grad_strides,
            scale * _LOG2E,
            **plan.dkdv,
        )
    # dk and dv of sink tokens, from queries outside the window
    if sinks is not None:
        attention_bwd_sink_sum_kernel[(SINKS.value * k.shape[0] * k.shape[1],)](
            part_dk,
            part_dv,
            windows,
            sinks,
            far_dk,
            far_dv,
            q.shape[2],
            k.shape[1],
            GROUP=q.shape[1] // k.shape[1],
            SIZE=q.shape[3],
            BLOCK_M=plan.dq.get("BLOCK_M") or block_m(_bwd_dq, "bwd_dq", q.shape[3], q.dtype),
            BLOCK_D=plan.block_d,
        )
    # dk, dv and d log u
    _bwd_dkdv[plan.dkdv_grid](
        q,
        k,
        v,
        log_utility,
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
        scale * _LOG2E,
        **plan.dkdv,
    )
    dsink = lse.new_empty(0)
    if sink_logits is not None:
        dsink = -(torch.exp2(sink_logits[:, None] * _LOG2E - lse) * delta).sum((0, 2))
    return dq, dk, dv, dgate, dsink


def _fake_backward(
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
    dq, dk, dv, dgate, dsink = torch.ops.spkv.attention_backward.default(
        grad,
        q,
        k,
        v,
        windows,
        log_utility,
        keep,
        out,
        lse,
        ctx.scale,
        sinks,
        sink_logits,
        starts,
        ctx.softcap,
    )
    gate_grad = dgate if log_utility is not None else None
    return (
        dq,
        dk,
        dv,
        None,
        gate_grad,
        None,
        None,
        None,
        dsink if sink_logits is not None else None,
        None,
        None,
    )


def _no_second_derivative(*_: Any) -> None:
    """Refuse to differentiate the backward pass."""
    raise RuntimeError("spkv::attention has no second derivative")


# Functions of the operators are called without the wrappers of torch.library.custom_op, which take longer than they do
for _name, _function, _fake, _derivative, _setup in (
    ("spkv::attention", _forward, _fake_forward, _autograd, _setup_context),
    ("spkv::attention_backward", _backward, _fake_backward, _no_second_derivative, None),
):
    torch.library.define(_name, torch.library.infer_schema(_function, mutates_args=()))
    torch.library.impl(_name, "default", _function)
    torch.library.register_fake(_name, _fake)
    torch.library.register_autograd(_name, _derivative, setup_context=_setup)


class _Plan(NamedTuple):
    """Grids and keyword arguments of the launches for tensors of one shape.

    Attributes:
        block_d: padded head size.
        fwd_grid: grid of the forward kernel; with autotuning, a function of the tuned tile.
        fwd: keyword arguments of the forward kernel.
        dq_grid: grid of the kernel of dq.
        dq: keyword arguments of the kernel of dq.
        dkdv_grid: grid of the kernels of dk and dv.
        dkdv: keyword arguments of the kernels of dk and dv.
    """

    block_d: int
    fwd_grid: Any
    fwd: dict[str, Any]
    dq_grid: Any
    dq: dict[str, Any]
    dkdv_grid: Any
    dkdv: dict[str, Any]


def _plan_of(
    q: Tensor, k: Tensor, log_utility: Tensor | None, keep: Tensor | None, softcap: float | None
) -> _Plan:
    """Return the launches for the tensors of a call."""
    mode = _SOFT if log_utility is not None else _HARD if keep is not None else _NONE
    return _plan(q.shape, k.shape[1], q.dtype, mode, softcap)


@lru_cache(maxsize=256)
def _plan(
    shape: tuple[int, int, int, int],
    heads: int,
    dtype: torch.dtype,
    mode: int,
    softcap: float | None,
) -> _Plan:
    """Compute the launches for queries of ``shape`` [B, Hq, T, D] and ``heads`` KV heads."""
    batch, query_heads, length, size = shape
    common: dict[str, Any] = {
        "softcap": None if softcap is None else softcap * _LOG2E,
        "length": length,
        "heads": heads,
        "GROUP": query_heads // heads,
        "MODE": mode,
        "SIZE": size,
        "BLOCK_D": max(16, triton.next_power_of_2(size)),
    }

    def launch(kernel: str, block: str, rows: int) -> tuple[Any, dict[str, Any]]:
        """Return grid, tiles of ``block`` tokens times ``rows`` heads, and keyword arguments of a kernel."""
        options = launch_options(kernel, size, dtype)
        if not options:  # the tuner chooses the tile
            return lambda meta: (triton.cdiv(length, meta[block]) * rows,), common
        return (triton.cdiv(length, options[block]) * rows,), {**common, **options}

    dkdv_grid, dkdv = launch("bwd_dkdv", "BLOCK_N", batch * heads)
    even = {"EVEN": length % LARGEST_BLOCK == 0}
    forward_and_dq = (
        launch(kernel, "BLOCK_M", batch * query_heads) for kernel in ("fwd", "bwd_dq")
    )
    (fwd_grid, fwd), (dq_grid, dq) = forward_and_dq
    return _Plan(common["BLOCK_D"], fwd_grid, fwd, dq_grid, dq, dkdv_grid, {**dkdv, **even})


def _sink_buffers(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Allocate dk and dv of sink tokens, float32: sums [B * Hkv, SINKS, D], and parts [B * Hq, blocks, SINKS, D]."""
    batch, query_heads, length, size = q.shape
    blocks = triton.cdiv(length, smallest_block_m("bwd_dq", size, q.dtype))
    sums, parts = (
        (batch * k.shape[1], SINKS.value, size),
        (batch * query_heads, blocks, SINKS.value, size),
    )
    return tuple(q.new_empty(shape, dtype=torch.float32) for shape in (sums, sums, parts, parts))


def _ends(starts: Tensor) -> Tensor:
    """Return the position after the document of each token, int32 [B, T], from where documents start."""
    positions = torch.arange(starts.shape[1], dtype=torch.int32, device=starts.device).expand_as(
        starts
    )
    return torch.searchsorted(starts, positions.contiguous(), right=True, out_int32=True)


def _dense_rows(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return ``x`` [B, H, T, D], copied unless D is contiguous, and its strides of B, H and T."""
    strides = x.stride()
    if strides[3] != 1 and x.shape[3] != 1:
        x = x.contiguous()
        strides = x.stride()
    return x, strides[:3]


def _tokens_first(x: Tensor) -> Tensor:
    """Make an empty tensor [B, H, T, D] with the memory layout [B, T, H, D], which its neighbours in a model use."""
    _, heads, length, size = x.shape
    return x.new_empty_strided(x.shape, (length * heads * size, size, heads * size, 1))


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
    if log_utility is not None:
        log_utility = log_utility.to(torch.float32).contiguous()
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
    out: Tensor
    out, _ = torch.ops.spkv.attention.default(
        q, k, v, windows, log_utility, keep, scale, sinks, sink_logits, starts, softcap
    )
    return out
