"""Measure one attention layer with the project's kernels, to create a ``Calibration``.

A step appends one token to a ``PagedKVCache`` and runs ``decode_attention`` on it. The caches of several layers take
turns, as in a model, so that keys come from main memory and not from the processor's caches. At each context, rounds
interleave the numbers of global heads; the result is the median after a warm-up. Kernel launches are included, as in
``spkv-nas generate``.
"""

from collections.abc import Callable, Sequence

import torch
from spkv_kernels import PagedKVCache, decode_attention
from spkv_kernels.timing import device_name, interleaved
from torch import Tensor

from spkv_nas.base import errors, version
from spkv_nas.base.progress import Progress, no_progress
from spkv_nas.cost.calibration import Calibration, LayerCase, Timing
from spkv_nas.cost.formulas import head_bytes, visible_keys

DECODE_ROUNDS = 15
_MAX_LAYERS = 8
_CACHE_BYTES = 1 << 28  # of all caches together; one per number of global heads is always allowed


def time_attention(
    case: LayerCase, contexts: Sequence[int], *, progress: Progress = no_progress
) -> Calibration:
    """Measure a layer at each of the context lengths, in tokens; ``UserError`` if the GPU has too little memory."""
    timings: list[Timing] = []
    try:
        with torch.no_grad():
            for done, context in enumerate(contexts):
                progress(done, len(contexts))
                timings += _time_decoding(case, context)
    except torch.OutOfMemoryError as error:
        raise errors.UserError(
            f"{case.device} is out of memory for a layer with {context:,} tokens x {case.batch}\n"
            "use a shorter --context or a smaller --batch"
        ) from error
    progress(len(contexts), len(contexts))
    return Calibration(
        case,
        device_name(case.device),
        torch.get_num_threads(),
        tuple(timings),
        version.environment(),
    )


def _time_decoding(case: LayerCase, context: int) -> list[Timing]:
    """Time decoding for every number of global heads; the first timed step attends to ``context`` tokens."""
    # Draw random q [B, Hq, T, D] and k, v [B, Hkv, T, D]
    generator = torch.Generator(case.device).manual_seed(0)

    def drawn(num_heads: int) -> Tensor:
        shape = (case.batch, num_heads, context, case.head_dim)
        tensor = torch.randn(shape, generator=generator, device=case.device)
        return tensor.to(getattr(torch, case.dtype))

    q = drawn(case.num_heads)
    k = drawn(case.num_kv_heads)
    v = drawn(case.num_kv_heads)
    # Time a step, and round to the six digits that the file stores
    layers = _num_layers(case, context)
    candidates = {
        num_global: _decode_step(case, num_global, layers, q[:, :, -1].contiguous(), k, v)
        for num_global in case.global_counts
    }
    seconds = interleaved(candidates, DECODE_ROUNDS, case.device)
    num_tokens = layers * case.batch
    return [
        Timing(context, num_global, float(f"{step_seconds / num_tokens:.6g}"))
        for num_global, step_seconds in seconds.items()
    ]


def _decode_step(
    case: LayerCase, num_global: int, layers: int, q: Tensor, k: Tensor, v: Tensor
) -> Callable[[], None]:
    """Return a function that appends a token to and attends in each of ``layers`` caches, with q [B, Hq, D].

    The caches are filled with k and v [B, Hkv, T, D] such that, after the warm-up step, the first timed token is
    number T.
    """
    # Fill the caches
    is_global = torch.arange(case.num_kv_heads, device=k.device) < num_global
    keep = is_global.expand(case.batch, -1)
    filled = max(0, k.shape[2] - 2)
    caches = []
    for _ in range(layers):
        cache = PagedKVCache(
            case.batch,
            case.num_kv_heads,
            case.head_dim,
            window=case.window,
            dtype=k.dtype,
            device=k.device,
        )
        if filled:
            keep_all = keep[:, :, None].expand(-1, -1, filled)
            cache.prefill(k[:, :, :filled], v[:, :, :filled], keep_all)
        cache.reserve(DECODE_ROUNDS + 1)  # otherwise the pool would grow during the measurement
        caches.append(cache)
    # Time one token per cache
    new_k = k[:, :, -1].contiguous()
    new_v = v[:, :, -1].contiguous()

    def step() -> None:
        for cache in caches:
            cache.append(new_k, new_v, keep)
            decode_attention(q, cache)

    return step


def _num_layers(case: LayerCase, context: int) -> int:
    """Return the number of caches per step: up to eight, within ``_CACHE_BYTES`` over all numbers of global heads."""
    item = getattr(torch, case.dtype).itemsize
    num_heads = case.num_kv_heads
    keys = sum(
        num_heads * visible_keys(context, density=num_global / num_heads, window=case.window)
        for num_global in case.global_counts
    )
    layer_bytes = case.batch * head_bytes(keys, case.head_dim, item)
    return max(1, min(_MAX_LAYERS, int(_CACHE_BYTES // layer_bytes)))
