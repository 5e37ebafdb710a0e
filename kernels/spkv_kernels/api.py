"""The one public module: validates, picks a backend, calls it.

    s(t, s) = <q_t, k_s> * scale + bias(t, s),    bias = 0 where 0 <= t - s < w_h, else log u_s | 0 or -inf
    out_t   = sum_s softmax(s)(t, s) v_s          over s <= t

SP-KV paper, section "Self-Pruned KV Mechanism". ``w`` counts the query's own key.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

BACKENDS = ("reference", "cpu")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | Tensor,
    log_utility: Tensor | None = None,
    keep: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention with a local window per KV head and a gate on the keys outside it.

    Args:
        q: [B, Hq, T, D], float32 or bfloat16 (float64 and float16 too on the reference backend).
        k, v: [B, Hkv, T, D]; Hq is a multiple of Hkv, query head h reads KV head h // (Hq / Hkv).
        window: visible recent keys, the query's own included: an int, or an int tensor [Hkv]. T or more is global.
        log_utility: [B, Hkv, T], floating point, at most 0: added to the scores of keys outside the window.
            Differentiable.
        keep: bool [B, Hkv, T]: outside the window only these keys are visible. Excludes ``log_utility``.
        scale: of the scores; 1 / sqrt(D) by default.
        backend: "auto", "reference" or "cpu". One asked for by name never falls back to another.

    Returns:
        [B, Hq, T, D] in the dtype of ``q``. Without a gate every key is visible to heads whose window is T or more,
        and only the window to the others.

    Raises:
        ValueError: shapes, dtypes, devices or the backend do not fit; the message names the argument.
    """
    windows = _check(q, k, v, window, log_utility, keep)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if backend == "auto":
        if q.device.type != "cpu":
            raise ValueError(f"backend 'auto' has none for device {q.device}; ask for backend='reference' by name")
        backend = "cpu"
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected 'auto', {', '.join(map(repr, BACKENDS))}; found {backend!r}")
    module = importlib.import_module(f"spkv_kernels.{backend}")
    out: Tensor = module.attention(q, k, v, windows, log_utility, keep, scale)
    return out


def _check(
    q: Tensor, k: Tensor, v: Tensor, window: int | Tensor, log_utility: Tensor | None, keep: Tensor | None
) -> tuple[int, ...]:
    """Raise for what does not fit; the window of every KV head, at most T."""
    if q.ndim != 4:
        raise ValueError(f"q: expected [B, Hq, T, D]; found shape {tuple(q.shape)}")
    batch, query_heads, length, size = q.shape
    if length == 0:
        raise ValueError("q: expected at least one token; found T = 0")
    if k.ndim != 4 or (k.shape[0], *k.shape[2:]) != (batch, length, size):
        raise ValueError(f"k: expected [{batch}, Hkv, {length}, {size}]; found shape {tuple(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v: expected the shape of k, {tuple(k.shape)}; found {tuple(v.shape)}")
    heads = k.shape[1]
    if heads == 0 or query_heads % heads:
        raise ValueError(f"q: expected a multiple of k's {heads} heads; found {query_heads}")
    if q.dtype not in _DTYPES:
        raise ValueError(f"q: expected a floating-point dtype; found {q.dtype}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(f"{name}: expected {q.dtype} on {q.device} as q; found {tensor.dtype} on {tensor.device}")
    if log_utility is not None and keep is not None:
        raise ValueError("give log_utility (soft gate) or keep (hard gate), not both")
    gate_shape = (batch, heads, length)
    if log_utility is not None and (log_utility.shape != gate_shape or not log_utility.is_floating_point()):
        raise ValueError(
            f"log_utility: expected floating point {gate_shape}; found {log_utility.dtype} {tuple(log_utility.shape)}"
        )
    if keep is not None and (keep.shape != gate_shape or keep.dtype != torch.bool):
        raise ValueError(f"keep: expected bool {gate_shape}; found {keep.dtype} {tuple(keep.shape)}")
    return _windows(window, heads, length)


def _windows(window: int | Tensor, heads: int, length: int) -> tuple[int, ...]:
    if isinstance(window, Tensor):
        if window.shape != (heads,) or window.is_floating_point() or window.dtype == torch.bool:
            raise ValueError(f"window: expected an int tensor [{heads}]; found {window.dtype} {tuple(window.shape)}")
        values = tuple(int(w) for w in window.tolist())
    else:
        values = (int(window),) * heads
    if min(values) < 1:
        raise ValueError(f"window: expected 1 or more (the query's own key counts); found {min(values)}")
    return tuple(min(w, length) for w in values)
