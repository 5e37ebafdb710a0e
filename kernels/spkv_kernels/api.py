"""Public operators: validate arguments, choose a backend, and call it.

    s(t, s) = <q_t, k_s> * scale + bias(t, s),    or c tanh(<q_t, k_s> * scale / c) + bias(t, s) with a soft cap c
    bias(t, s) = 0 where 0 <= t - s < w_h or s - start_t < n_h, else log u_s | 0 or -inf
    p(t, s) = exp(s(t, s)) / (exp(sink) + sum_s exp(s(t, s))),    out_t = sum_s p(t, s) v_s    over start_t <= s <= t

SP-KV paper, section "Self-Pruned KV Mechanism". The window ``w`` counts the query's own key. Sink tokens, the first
``n_h`` keys of the document, which starts at ``start_t``: StreamingLLM (arXiv 2309.17453). Learned sinks, a logit per
query head: gpt-oss. Soft caps: Gemma 2.
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
_MIN = {"window": (1, "1 or more (the query's own key included)"), "sinks": (0, "0 or more")}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | tuple[int, ...] | Tensor,
    sinks: int | tuple[int, ...] | Tensor = 0,
    sink_logits: Tensor | None = None,
    log_utility: Tensor | None = None,
    keep: Tensor | None = None,
    starts: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute causal attention with a local window per KV head and a gate on the keys outside it.

    Args:
        q: [B, Hq, T, D], float64, float32, bfloat16 or float16; 16-bit inputs are computed in float32.
        k: [B, Hkv, T, D]; Hq is a multiple of Hkv, query head h reads KV head h // (Hq / Hkv).
        v: [B, Hkv, T, D].
        window: number of recent keys that are always visible, including the query's own: an int, or one per KV head as
            a tuple or an int tensor [Hkv]. T or more is global. A tuple is constant for ``torch.compile``; reading a
            tensor on the CPU would break its graph. The values of a tensor on the GPU are not checked (below 1 counts
            as 1), because reading them would synchronise, which a CUDA graph cannot do.
        sinks: number of sink tokens: the first keys of the document, which later queries always see, too, without a
            gate. An int, a tuple, or an int tensor [Hkv] like ``window`` (below 0 on the GPU counts as 0). 0: none.
        sink_logits: [Hq], floating point, learned sinks: logits that only add exp(logit) to the denominator of the
            head's softmax. -inf or None: none. Differentiable.
        log_utility: [B, Hkv, T], floating point, natural logarithm of the utility (at most 0; not checked), which is
            added to the scores of keys outside the window, except sink tokens. Differentiable.
        keep: bool [B, Hkv, T]; outside the window only these keys and sink tokens are visible. Excludes
            ``log_utility``.
        starts: int [B, T], for documents packed into one row: the position at which the query's document starts, which
            is the first key that it sees. Padding counts as a document. None: each row is one document. Values are not
            checked on a GPU.
        scale: scale of the scores; None: 1 / sqrt(D).
        softcap: positive cap of the scores before bias and learned sinks, or None.
        backend: "auto" (cpu for tensors on the CPU, triton for CUDA tensors), "reference" (any device), "cpu" or
            "triton" (not float64, D up to 256). A backend requested by name never falls back to another.

    Returns:
        [B, Hq, T, D] in the dtype of ``q``. Without a gate, heads whose window is T or more see every key, and the
        others only their window and their sink tokens.

    Raises:
        ValueError: shapes, dtypes, devices or the backend do not fit; the message names the argument.
    """
    # Check the arguments
    _check(q, k, v, log_utility, keep)
    name = _backend(backend, q)
    per_head = _per_head_tensor if name == "triton" else _per_head
    windows: tuple[int, ...] | Tensor = per_head("window", window, k.shape[1], q.shape[2], q.device)
    num_sinks = _sinks(sinks, windows, k.shape[1], q.shape[2], q.device)
    scale, softcap = _scale(scale, q), _softcap(softcap)
    sink_logits = _sink_logits(sink_logits, q)
    if starts is not None:
        _check_starts(starts, q)
    # Call the backend
    attend = _implementation(name)
    return attend(
        q, k, v, windows, log_utility, keep, scale, num_sinks, sink_logits, starts, softcap
    )


def decode_attention(
    q: Tensor,
    cache: PagedKVCache,
    *,
    sink_logits: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute attention of the newest token of every sequence over its cache. Not differentiable.

    Args:
        q: [B, Hq, D]; the token's key must have been appended.
        cache: cache of the layer. A sequence must hold at least one token. Sink tokens are those of its keys that were
            added with ``keep``, like all others outside the window.
        sink_logits: [Hq], floating point, learned sinks as in ``attention``, or None.
        scale: scale of the scores; None: 1 / sqrt(D).
        softcap: positive cap of the scores before bias and learned sinks, or None.
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
    scale, softcap = _scale(scale, q), _softcap(softcap)
    if backend == "auto":
        backend = "triton" if q.device.type == "cuda" else "torch"
    _check_name(backend, DECODE_BACKENDS)
    sink_logits = _sink_logits(sink_logits, q)
    # Call the backend
    if backend == "triton":
        _check_triton(q.device, torch.promote_types(q.dtype, cache.pool_k.dtype), q.shape[-1])
        from spkv_kernels.triton import decode_kernels as kernels

        return kernels.decode_attention(q, cache, scale, sink_logits, softcap)
    if not bool((cache.seq_lens > 0).all()):
        raise ValueError("cache: a sequence is empty; append a token to it first")
    if backend == "reference":
        from spkv_kernels import reference

        return reference.decode_attention(q, cache, scale, sink_logits, softcap)
    from spkv_kernels import decode

    return decode.decode_attention(q, cache, scale, sink_logits, softcap)


def extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    cache: PagedKVCache,
    *,
    sink_logits: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
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
        sink_logits: [Hq], floating point, learned sinks as in ``attention``, or None.
        scale: scale of the scores; None: 1 / sqrt(D).
        softcap: positive cap of the scores before bias and learned sinks, or None.

    Returns:
        [B, Hq, T, D] in the dtype of ``q``.

    Raises:
        ValueError: shapes do not fit the cache or each other.
    """
    batch, num_tokens = cache.batch_size, k.shape[2] if k.ndim == 4 else -1
    _check_queries(q, (batch, None, num_tokens, cache.head_dim), cache)
    _check(q, k, v, None, keep)
    if k.shape[1] != cache.num_kv_heads:
        raise ValueError(
            f"k: expected {cache.num_kv_heads} heads, as in the cache; found {k.shape[1]}"
        )
    from spkv_kernels import decode

    sink_logits = _sink_logits(sink_logits, q)
    return decode.extend_attention(
        q, k, v, keep, cache, _scale(scale, q), sink_logits, _softcap(softcap)
    )


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
        raise ValueError(
            f"backend: expected 'auto', {', '.join(map(repr, backends))}; found {name!r}"
        )


def _check_triton(device: torch.device, dtype: torch.dtype, size: int) -> None:
    """Raise ``ValueError`` if the triton backend does not support a device, dtype or head size."""
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise ValueError(
            f"backend: 'triton' expects tensors on a CUDA device; found {device} "
            "(for tests, TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
        )
    if dtype == torch.float64:
        raise ValueError(
            "q: backend 'triton' supports float32, bfloat16 and float16; found torch.float64"
        )
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


def _check(
    q: Tensor, k: Tensor, v: Tensor, log_utility: Tensor | None, keep: Tensor | None
) -> None:
    """Raise ``ValueError`` for shapes, dtypes or devices that do not fit each other."""
    # Shapes of q, k and v
    if q.ndim != 4:
        raise ValueError(f"q: expected [B, Hq, T, D]; found shape {tuple(q.shape)}")
    if q.numel() == 0:
        raise ValueError(
            f"q: expected at least one sequence, head, token and channel; found shape {tuple(q.shape)}"
        )
    batch, query_heads, length, size = q.shape
    if k.ndim != 4 or (k.shape[0], *k.shape[2:]) != (batch, length, size):
        raise ValueError(
            f"k: expected [{batch}, Hkv, {length}, {size}]; found shape {tuple(k.shape)}"
        )
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
    if log_utility is not None and (
        log_utility.shape != gate_shape or log_utility.dtype not in _DTYPES
    ):
        raise ValueError(
            f"log_utility: expected floating point {gate_shape}; found {log_utility.dtype} {tuple(log_utility.shape)}"
        )
    if keep is not None and (keep.shape != gate_shape or keep.dtype != torch.bool):
        raise ValueError(
            f"keep: expected bool {gate_shape}; found {keep.dtype} {tuple(keep.shape)}"
        )
    # Agreement with q
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: expected {q.dtype}, the dtype of q; found {tensor.dtype}")
    for name, optional in (("k", k), ("v", v), ("log_utility", log_utility), ("keep", keep)):
        if optional is not None and optional.device != q.device:
            raise ValueError(
                f"{name}: expected device {q.device}, that of q; found {optional.device}"
            )


def _scale(scale: float | None, q: Tensor) -> float:
    """Return the scale of the scores. Raises ``ValueError`` for 0, infinity and NaN."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if scale == 0 or not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number other than 0; found {scale}")
    return scale


def _softcap(softcap: float | None) -> float | None:
    """Return the cap of the scores as a float, or None. Raises ``ValueError`` unless it is positive and finite."""
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap: expected a finite number above 0, or None; found {softcap}")
    return None if softcap is None else float(softcap)


def _sink_logits(sink_logits: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the learned sinks [Hq] in the dtype of the scores. Raises ``ValueError`` unless they fit ``q``."""
    if sink_logits is None:
        return None
    if sink_logits.shape != q.shape[1:2] or sink_logits.dtype not in _DTYPES:
        raise ValueError(
            f"sink_logits: expected floating point [{q.shape[1]}], one per query head; "
            f"found {sink_logits.dtype} {tuple(sink_logits.shape)}"
        )
    if sink_logits.device != q.device:
        raise ValueError(
            f"sink_logits: expected device {q.device}, that of q; found {sink_logits.device}"
        )
    return sink_logits.to(torch.promote_types(q.dtype, torch.float32))


def _check_starts(starts: Tensor, q: Tensor) -> None:
    """Raise ``ValueError`` unless ``starts`` divides each row of ``q`` into documents; a GPU's values are not read."""
    expected = (q.shape[0], q.shape[2])
    if starts.shape != expected or starts.is_floating_point() or starts.dtype == torch.bool:
        raise ValueError(
            f"starts: expected int {expected}; found {starts.dtype} {tuple(starts.shape)}"
        )
    if starts.device != q.device:
        raise ValueError(f"starts: expected device {q.device}, that of q; found {starts.device}")
    if starts.is_cuda or torch.compiler.is_compiling():
        return
    previous = torch.cat([starts.new_zeros(len(starts), 1), starts[:, :-1]], 1)
    wrong = (starts != previous) & (starts != torch.arange(starts.shape[1], device=starts.device))
    if bool(wrong.any()):
        row, token = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"starts: expected {token} or {int(previous[row, token])} at token {token} of row {row}: a document starts "
            f"there, or continues; found {int(starts[row, token])}"
        )


def _sinks(
    sinks: int | tuple[int, ...] | Tensor,
    windows: tuple[int, ...] | Tensor,
    heads: int,
    length: int,
    device: torch.device,
) -> tuple[int, ...] | Tensor | None:
    """Return the number of sink tokens of every KV head, in the form of ``windows``; None if it is 0 for all.

    It is 0 for a global head, unless the windows are a tensor.
    """
    if isinstance(sinks, int) and sinks == 0:
        return None
    if isinstance(windows, Tensor):
        unread = isinstance(sinks, Tensor) and sinks.is_cuda
        if not unread and not any(_per_head("sinks", sinks, heads, length, device)):
            return None
        return _per_head_tensor("sinks", sinks, heads, length, device)
    values = _per_head("sinks", sinks, heads, length, device)
    values = tuple(0 if w == length else n for n, w in zip(values, windows, strict=True))
    return values if any(values) else None


def _per_head(
    name: str, value: int | tuple[int, ...] | Tensor, heads: int, length: int, _: torch.device
) -> tuple[int, ...]:
    """Return the window or the number of sinks of every KV head, clamped to T."""
    least, expected = _MIN[name]
    if isinstance(value, int) and value >= least:
        return (min(value, length),) * heads
    if isinstance(value, Tensor):
        _check_int_tensor(name, value, heads)
        values = tuple(int(n) for n in value.tolist())
    else:
        try:
            values = tuple(
                map(operator.index, value if isinstance(value, tuple) else (value,) * heads)
            )
        except TypeError:
            values = ()
        if len(values) != heads:
            raise ValueError(
                f"{name}: expected an int, or {heads} as a tuple or int tensor; found {value!r}"
            )
    if min(values) < least:
        raise ValueError(f"{name}: expected {expected}; found {min(values)}")
    return tuple(min(n, length) for n in values)


def _per_head_tensor(
    name: str, value: int | tuple[int, ...] | Tensor, heads: int, length: int, device: torch.device
) -> Tensor:
    """Return ``_per_head`` as int32 [Hkv] on ``device``, without reading a tensor that is already there."""
    if isinstance(value, Tensor) and value.device == device and device.type == "cuda":
        _check_int_tensor(name, value, heads)
        return value.clamp(_MIN[name][0], length).to(torch.int32)
    values = _per_head(name, value, heads, length, device)
    if isinstance(value, int) or len(set(values)) == 1:
        return torch.full((heads,), values[0], dtype=torch.int32, device=device)
    return torch.tensor(values, dtype=torch.int32, device=device)


def _check_int_tensor(name: str, value: Tensor, heads: int) -> None:
    """Raise ``ValueError`` unless ``value`` is an int tensor [Hkv]."""
    if value.shape != (heads,) or value.is_floating_point() or value.dtype == torch.bool:
        raise ValueError(
            f"{name}: expected an int tensor [{heads}]; found {value.dtype} {tuple(value.shape)}"
        )
