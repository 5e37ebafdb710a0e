"""Public operators: validate arguments, choose a backend, and call it.

    s(t, s) = <q_t, k_s> * scale + bias(t, s),    bias = 0 where 0 <= t - s < w_h, else log u_s | 0 or -inf
    out_t   = sum_s softmax(s)(t, s) v_s          over s <= t

SP-KV paper, section "Self-Pruned KV Mechanism". The window ``w`` counts the query's own key.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable

import torch
from torch import Tensor

from spkv_kernels.paged_cache import PagedKVCache

BACKENDS = ("reference", "cpu", "triton")  # of ``attention``
DECODE_BACKENDS = ("reference", "torch", "triton")
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
    """Compute causal attention with a local window per KV head and a gate on the keys outside it.

    Args:
        q: [B, Hq, T, D], float64, float32, bfloat16 or float16; 16-bit inputs are computed in float32.
        k: [B, Hkv, T, D]; Hq is a multiple of Hkv, query head h reads KV head h // (Hq / Hkv).
        v: [B, Hkv, T, D].
        window: number of recent keys that are always visible, including the query's own: an int, or an int tensor
            [Hkv]. T or more is global. The values of a tensor on the GPU are not checked (below 1 counts as 1), because
            reading them would synchronise, which a CUDA graph cannot do.
        log_utility: [B, Hkv, T], floating point, natural logarithm of the utility (at most 0; not checked), which is
            added to the scores of keys outside the window. Differentiable.
        keep: bool [B, Hkv, T]; outside the window only these keys are visible. Excludes ``log_utility``.
        scale: scale of the scores; None: 1 / sqrt(D).
        backend: "auto" (cpu for tensors on the CPU, triton for CUDA tensors), "reference" (any device), "cpu" or
            "triton" (not float64, D up to 256). A backend requested by name never falls back to another.

    Returns:
        [B, Hq, T, D] in the dtype of ``q``. Without a gate, heads whose window is T or more see every key, and the
        others only their window.

    Raises:
        ValueError: shapes, dtypes, devices or the backend do not fit; the message names the argument.
    """
    _check(q, k, v, log_utility, keep)
    name = _backend(backend, q)
    windows = (_window_tensor if name == "triton" else _windows)(window, k.shape[1], q.shape[2], q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if scale == 0 or not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number other than 0; found {scale}")
    out: Tensor = _implementation(name)(q, k, v, windows, log_utility, keep, scale)
    return out


def decode_attention(q: Tensor, cache: PagedKVCache, *, scale: float | None = None, backend: str = "auto") -> Tensor:
    """Compute attention of the newest token of every sequence over its cache. Not differentiable.

    Args:
        q: [B, Hq, D]; the token's key must have been appended.
        cache: cache of the layer. A sequence must hold at least one token.
        scale: scale of the scores; None: 1 / sqrt(D).
        backend: "auto" (triton for CUDA tensors, torch otherwise), "torch" (torch operations, any device), "triton"
            (not float64, D up to 256; never synchronises, so it can be captured in CUDA graphs, and returns zeros for
            an empty sequence) or "reference" (a loop over sequences and heads).

    Returns:
        [B, Hq, D] in the dtype of ``q``, computed in float32 (float64 for float64).

    Raises:
        ValueError: ``q`` does not fit the cache or the backend, or (except for triton) a sequence is empty.
    """
    # Check the arguments
    _check_queries(q, (cache.batch_size, None, cache.head_dim), cache)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if backend == "auto":
        backend = "triton" if q.device.type == "cuda" else "torch"
    _check_name(backend, DECODE_BACKENDS)
    # Call the backend
    if backend == "triton":
        _check_triton(q.device, torch.promote_types(q.dtype, cache.pool_k.dtype), q.shape[-1])
        from spkv_kernels.triton import decode_kernels as kernels

        return kernels.decode_attention(q, cache, scale)
    if not bool((cache.seq_lens > 0).all()):
        raise ValueError("cache: a sequence is empty; append a token to it first")
    if backend == "reference":
        from spkv_kernels import reference

        return reference.decode_attention(q, cache, scale)
    from spkv_kernels import decode

    return decode.decode_attention(q, cache, scale)


def extend_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, cache: PagedKVCache, *, scale: float | None = None
) -> Tensor:
    """Compute attention of T new tokens over the cache and each other, for chunked prompts and conversations.

    Store the tokens with ``PagedKVCache.prefill`` afterwards. A query at position t sees its window, and older keys if
    they are kept. Not differentiable; uses torch operations on any device.

    Args:
        q: [B, Hq, T, D].
        k: [B, Hkv, T, D].
        v: [B, Hkv, T, D].
        keep: bool [B, Hkv, T].
        cache: cache of the layer.
        scale: scale of the scores; None: 1 / sqrt(D).

    Returns:
        [B, Hq, T, D] in the dtype of ``q``.

    Raises:
        ValueError: shapes do not fit the cache or each other.
    """
    batch, num_tokens = cache.batch_size, k.shape[2] if k.ndim == 4 else -1
    _check_queries(q, (batch, None, num_tokens, cache.head_dim), cache)
    _check(q, k, v, None, keep)
    if k.shape[1] != cache.num_kv_heads:
        raise ValueError(f"k: expected {cache.num_kv_heads} heads, as in the cache; found {k.shape[1]}")
    from spkv_kernels import decode

    return decode.extend_attention(q, k, v, keep, cache, q.shape[-1] ** -0.5 if scale is None else float(scale))


def _check_queries(q: Tensor, shape: tuple[int | None, ...], cache: PagedKVCache) -> None:
    """Raise ``ValueError`` unless ``q`` has ``shape``; None stands for Hq, a multiple of the cache's heads."""
    fits = q.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, q.shape, strict=True))
    if not fits or q.shape[1] % cache.num_kv_heads:
        expected_shape = ", ".join("Hq" if n is None else str(n) for n in shape)
        raise ValueError(
            f"q: expected [{expected_shape}], Hq a multiple of the cache's {cache.num_kv_heads} heads; "
            f"found shape {tuple(q.shape)}"
        )


def _backend(name: str, q: Tensor) -> str:
    """Return the backend to use for ``q``. Raises ``ValueError`` if it does not support ``q``."""
    device = q.device
    if name == "auto":
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"backend: 'auto' has no backend for tensors on {device}\n"
                "select 'reference' by name: it runs on any device, slowly and with O(T^2) memory"
            )
        name = "triton" if device.type == "cuda" else "cpu"
    _check_name(name, BACKENDS)
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"backend: 'cpu' expects tensors on the CPU; found {device}")
    if name == "triton":
        _check_triton(device, q.dtype, q.shape[-1])
    return name


def _check_name(name: str, backends: tuple[str, ...]) -> None:
    """Raise ``ValueError`` for an unknown backend."""
    if name not in backends:
        raise ValueError(f"backend: expected 'auto', {', '.join(map(repr, backends))}; found {name!r}")


def _check_triton(device: torch.device, dtype: torch.dtype, size: int) -> None:
    """Raise ``ValueError`` if the triton backend does not support a device, dtype or head size."""
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise ValueError(
            f"backend: 'triton' expects tensors on a CUDA device; found {device} "
            "(for tests, TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
        )
    if dtype == torch.float64:
        raise ValueError("q: backend 'triton' supports float32, bfloat16 and float16; found torch.float64")
    if size > 256:
        raise ValueError(f"q: backend 'triton' supports heads of up to 256 channels; found {size}")


def _implementation(name: str) -> Callable[..., Tensor]:
    """Return the function of a backend, which is imported on first use."""
    if name == "reference":
        from spkv_kernels import reference

        return reference.attention
    if name == "cpu":
        from spkv_kernels import cpu

        return cpu.attention
    from spkv_kernels import triton

    return triton.attention


def _check(q: Tensor, k: Tensor, v: Tensor, log_utility: Tensor | None, keep: Tensor | None) -> None:
    """Raise ``ValueError`` for shapes, dtypes or devices that do not fit each other."""
    # Shapes of q, k and v
    if q.ndim != 4:
        raise ValueError(f"q: expected [B, Hq, T, D]; found shape {tuple(q.shape)}")
    if q.numel() == 0:
        raise ValueError(f"q: expected at least one sequence, head, token and channel; found shape {tuple(q.shape)}")
    batch, query_heads, length, size = q.shape
    if k.ndim != 4 or (k.shape[0], *k.shape[2:]) != (batch, length, size):
        raise ValueError(f"k: expected [{batch}, Hkv, {length}, {size}]; found shape {tuple(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v: expected the shape of k, {tuple(k.shape)}; found {tuple(v.shape)}")
    heads = k.shape[1]
    if heads == 0 or query_heads % heads:
        raise ValueError(f"q: expected a multiple of k's {heads} heads; found {query_heads}")
    # Dtypes and gates
    if q.dtype not in _DTYPES:
        raise ValueError(f"q: expected a floating-point dtype; found {q.dtype}")
    if log_utility is not None and keep is not None:
        raise ValueError("give log_utility (soft gate) or keep (hard gate), not both")
    gate_shape = (batch, heads, length)
    if log_utility is not None and (log_utility.shape != gate_shape or log_utility.dtype not in _DTYPES):
        raise ValueError(
            f"log_utility: expected floating point {gate_shape}; found {log_utility.dtype} {tuple(log_utility.shape)}"
        )
    if keep is not None and (keep.shape != gate_shape or keep.dtype != torch.bool):
        raise ValueError(f"keep: expected bool {gate_shape}; found {keep.dtype} {tuple(keep.shape)}")
    # Agreement with q
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: expected {q.dtype}, the dtype of q; found {tensor.dtype}")
    for name, optional in (("k", k), ("v", v), ("log_utility", log_utility), ("keep", keep)):
        if optional is not None and optional.device != q.device:
            raise ValueError(f"{name}: expected device {q.device}, that of q; found {optional.device}")


def _windows(window: int | Tensor, heads: int, length: int, _: torch.device) -> tuple[int, ...]:
    """Return the window of every KV head, clamped to T."""
    if isinstance(window, Tensor):
        _check_window_tensor(window, heads)
        values = tuple(int(w) for w in window.tolist())
    else:
        try:
            values = (operator.index(window),) * heads
        except TypeError:
            raise ValueError(f"window: expected an int or an int tensor [{heads}]; found {window!r}") from None
    if min(values) < 1:
        raise ValueError(f"window: expected 1 or more (the query's own key included); found {min(values)}")
    return tuple(min(w, length) for w in values)


def _window_tensor(window: int | Tensor, heads: int, length: int, device: torch.device) -> Tensor:
    """Return the windows as int32 [Hkv] on ``device``, without reading a tensor that is already there."""
    if isinstance(window, Tensor) and window.device == device and device.type == "cuda":
        _check_window_tensor(window, heads)
        return window.clamp(1, length).to(torch.int32)
    values = _windows(window, heads, length, device)
    if len(set(values)) == 1:
        return torch.full((heads,), values[0], dtype=torch.int32, device=device)
    return torch.tensor(values, dtype=torch.int32, device=device)


def _check_window_tensor(window: Tensor, heads: int) -> None:
    """Raise ``ValueError`` unless ``window`` is an int tensor [Hkv]."""
    if window.shape != (heads,) or window.is_floating_point() or window.dtype == torch.bool:
        raise ValueError(f"window: expected an int tensor [{heads}]; found {window.dtype} {tuple(window.shape)}")
