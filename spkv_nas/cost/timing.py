"""Measure one attention layer with the project's kernels, to create a ``Calibration``.

Decoding appends one token to a ``PagedKVCache`` and runs ``decode_attention`` on it. The caches of several layers take
turns, as in a model, so that keys come from main memory and not from the processor's caches. Prefill runs ``attention``
on a whole sequence with a window per KV head. At each context, rounds interleave the numbers of global heads; the
result is the median after a warm-up. Kernel launches are included, as in ``spkv-nas generate``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from spkv_kernels import PagedKVCache, attention, decode_attention
from spkv_kernels.timing import device_name, interleaved
from torch import Tensor

from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.base.version import environment
from spkv_nas.cost.calibration import Calibration, LayerCase, Phase, Timing
from spkv_nas.cost.formulas import head_bytes, visible_keys

DECODE_ROUNDS, PREFILL_ROUNDS = 15, 3
PREFILL_SECONDS = 4.0  # per call; prefill skips contexts that would take longer
_MAX_LAYERS = 8
_CACHE_BYTES = 1 << 28  # of all caches together; one per number of global heads is always allowed


def time_attention(case: LayerCase, contexts: Sequence[int], *, progress: Progress | None = None) -> Calibration:
    """Measure a layer at each context; prefill stops where a call would exceed ``PREFILL_SECONDS``.

    Args:
        case: the layer.
        contexts: context lengths in tokens, ascending.
        progress: called with (done, total) steps.

    Raises:
        UserError: the GPU has too little memory.
    """
    # Measure decoding at all contexts, then prefill
    timings: list[Timing] = []
    report, total = progress or (lambda done, total: None), 2 * len(contexts)
    try:
        with torch.no_grad():
            for done, context in enumerate([*contexts, *contexts]):
                report(done, total)
                if done < len(contexts):
                    timings += _time_decoding(case, context)
                elif _prefill_seconds(timings, case, context) <= PREFILL_SECONDS:
                    timings += _time_prefill(case, context)
                else:
                    break
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{case.device} is out of memory for a layer with {context:,} tokens x {case.batch}\n"
            "use a shorter --context or a smaller --batch"
        ) from error
    report(total, total)
    return Calibration(case, device_name(case.device), torch.get_num_threads(), tuple(timings), environment())


def _time_decoding(case: LayerCase, context: int) -> list[Timing]:
    """Time decoding for every number of global heads; the first timed step attends to ``context`` tokens."""
    q, k, v = _tensors(case, context)
    layers = _num_layers(case, context)
    candidates = {g: _decode_step(case, g, layers, q[:, :, -1].contiguous(), k, v) for g in case.global_counts}
    seconds = interleaved(candidates, DECODE_ROUNDS, case.device)
    return _timings("decode", context, seconds, calls=layers * case.batch)


def _decode_step(case: LayerCase, num_global: int, layers: int, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], None]:
    """Return a function that appends a token to and attends in each of ``layers`` caches, with q [B, Hq, D].

    The caches are filled with k and v [B, Hkv, T, D] such that, after the warm-up step, the first timed token is
    number T.
    """
    # Fill the caches
    keep = (torch.arange(case.num_kv_heads, device=k.device) < num_global).expand(case.batch, -1)
    filled = max(0, k.shape[2] - 2)
    caches = []
    for _ in range(layers):
        cache = PagedKVCache(
            case.batch, case.num_kv_heads, case.head_dim, window=case.window, dtype=k.dtype, device=k.device
        )
        if filled:
            cache.prefill(k[:, :, :filled], v[:, :, :filled], keep[:, :, None].expand(-1, -1, filled))
        cache.reserve(DECODE_ROUNDS + 1)  # otherwise the pool would grow during the measurement
        caches.append(cache)
    # Time one token per cache
    new_k, new_v = k[:, :, -1].contiguous(), v[:, :, -1].contiguous()

    def step() -> None:
        for cache in caches:
            cache.append(new_k, new_v, keep)
            decode_attention(q, cache)

    return step


def _time_prefill(case: LayerCase, context: int) -> list[Timing]:
    """Time prefill of ``context`` tokens for every number of global heads."""
    q, k, v = _tensors(case, context)
    heads = torch.arange(case.num_kv_heads, device=k.device)

    def call(num_global: int) -> Callable[[], object]:
        windows = torch.where(heads < num_global, context, case.window)
        return lambda: attention(q, k, v, window=windows)

    candidates = {num_global: call(num_global) for num_global in case.global_counts}
    seconds = interleaved(candidates, PREFILL_ROUNDS, case.device)
    return _timings("prefill", context, seconds, calls=context * case.batch)


def _prefill_seconds(timings: list[Timing], case: LayerCase, context: int) -> float:
    """Predict the slowest prefill call from the largest context so far, as attention is quadratic; 0 for the first."""
    last = timings[-1].context
    previous = (row.seconds_per_token for row in timings if row.phase == "prefill" and row.context == last)
    return max(previous, default=0.0) * last * case.batch * (context / last) ** 2


def _num_layers(case: LayerCase, context: int) -> int:
    """Return the number of caches per step: up to eight, within ``_CACHE_BYTES`` over all numbers of global heads."""
    item = getattr(torch, case.dtype).itemsize
    keys = sum(
        case.num_kv_heads * visible_keys(context, density=g / case.num_kv_heads, window=case.window)
        for g in case.global_counts
    )
    return max(1, min(_MAX_LAYERS, int(_CACHE_BYTES // (case.batch * head_bytes(keys, case.head_dim, item)))))


def _tensors(case: LayerCase, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q [B, Hq, T, D] and k, v [B, Hkv, T, D]."""
    generator = torch.Generator(case.device).manual_seed(0)
    drawn = partial(torch.randn, generator=generator, device=case.device)
    q, k, v = (
        drawn(case.batch, heads, context, case.head_dim).to(getattr(torch, case.dtype))
        for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    )
    return q, k, v


def _timings(phase: Phase, context: int, seconds: dict[int, float], *, calls: int) -> list[Timing]:
    """Convert seconds to times per token, rounded to the six digits stored in the file."""
    return [Timing(phase, context, g, float(f"{value / calls:.6g}")) for g, value in seconds.items()]
