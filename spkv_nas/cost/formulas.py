"""What attention costs by formula: FLOPs in Kaplan's accounting and bytes of the KV cache; needs no torch.

SP-KV paper, appendix "Inference efficiency". In both, all that matters is how many keys a KV head sees on average::

    keys  = recent + density * (context - recent),    recent = min(window, context)
    FLOPs = 2 N + 2 L d_attn keys                     per token, forward
    bytes = 2 L Hkv D element_size keys               of one sequence

so dense attention is density 1, and a layout is the share of its global heads. With window 0 these are the paper's
equations, which leave the window out. Kaplan's attention term is the mean over the positions of a causal sequence of
``context`` tokens (queries by keys and scores by values, 4 L d_attn per key, over half the keys on average); a token
decoded at the end of the context costs twice that term. The predictors, some 4 % of 2 N, are not counted.

No formula gives the time that attention takes: see ``spkv_nas.cost.times``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spkv_nas.artifacts.grid import check_grid
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import HeadShape, Shape
from spkv_nas.base.errors import UserError


def visible_keys(context: int, *, density: float = 1.0, window: int = 0) -> float:
    """Keys that a KV head holds at ``context`` tokens: all in the window, a share of those before it.

    Raises:
        UserError: a context below 1, a density outside [0, 1] or a negative window.
    """
    _check(context, density, window)
    recent = min(window, context)
    return recent + density * (context - recent)


def mean_visible_keys(context: int, *, density: float = 1.0, window: int = 0) -> float:
    """Keys that a query sees, its own included, on average over a causal sequence of ``context`` tokens.

    (context + 1) / 2 with density 1, and recent - recent (recent - 1) / (2 context) with density 0. Raises
    ``UserError`` as ``visible_keys`` does.
    """
    _check(context, density, window)
    recent = min(window, context)
    local = recent - recent * (recent - 1) / (2 * context)
    return local + density * ((context + 1) / 2 - local)


def _check(context: int, density: float, window: int) -> None:
    if context < 1:
        raise UserError(f"a context has at least 1 token; found {context}")
    if not 0.0 <= density <= 1.0:
        raise UserError(f"density is a share of tokens, in [0, 1]; found {density:g}")
    if window < 0:
        raise UserError(f"a window cannot be negative; found {window}")


def attention_flops(shape: HeadShape, context: int, *, density: float = 1.0, window: int = 0) -> float:
    """FLOPs of attention per token, forward: 2 L d_attn keys. Raises ``UserError`` as ``visible_keys`` does."""
    return 2 * shape.num_layers * shape.attention_width * visible_keys(context, density=density, window=window)


def flops_per_token(shape: Shape, context: int, *, density: float = 1.0, window: int = 0) -> float:
    """FLOPs per token, forward: 2 N for the linear layers, and attention."""
    return 2 * shape.num_parameters + attention_flops(shape, context, density=density, window=window)


def training_flops(shape: Shape, num_tokens: float, block_size: int) -> float:
    """FLOPs of training on blocks of ``block_size`` tokens; the backward pass costs two forward passes.

    Gives the paper's table "Main scaling study parameters" within 0.5 % (Llama 3 8B: 3.3 % below).
    """
    return 3 * num_tokens * flops_per_token(shape, block_size)


@dataclass(frozen=True)
class Cost:
    """What attention with ``density`` beyond the window costs; FLOPs are forward, per token.

    ``decode_seconds`` and ``prefill_seconds`` are those of the attention of all layers, per token, from an
    ``AttentionTimes``; None: unknown.
    """

    name: str
    density: float
    kv_bytes_per_token: float
    kv_cache_bytes: float
    attention_flops: float
    total_flops: float
    decode_seconds: float | None = None
    prefill_seconds: float | None = None


def cost(
    name: str, shape: Shape, context: int, *, density: float = 1.0, window: int = 0, element_size: int = 2
) -> Cost:
    """All but the times at once. Raises ``UserError`` as ``visible_keys`` does."""
    seen: Any = {"density": density, "window": window}
    return Cost(
        name=name,
        density=density,
        kv_bytes_per_token=kv_bytes_per_token(shape, density=density, element_size=element_size),
        kv_cache_bytes=kv_cache_bytes(shape, context, element_size=element_size, **seen),
        attention_flops=attention_flops(shape, context, **seen),
        total_flops=flops_per_token(shape, context, **seen),
    )


def head_bytes(keys: float, head_dim: int, element_size: int) -> float:
    """Bytes of ``keys`` tokens in the cache of one KV head, key and value: 2 D element_size keys."""
    return 2 * head_dim * element_size * keys


def kv_bytes_per_token(shape: Shape, *, density: float = 1.0, element_size: int = 2) -> float:
    """Bytes by which the KV cache grows with each token, once the window is full.

    ``element_size`` is the bytes of one number (2: bfloat16).
    """
    return shape.num_layers * shape.num_kv_heads * head_bytes(density, shape.head_dim, element_size)


def kv_cache_bytes(
    shape: Shape, context: int, *, density: float = 1.0, window: int = 0, element_size: int = 2
) -> float:
    """Bytes of the KV cache of one sequence of ``context`` tokens."""
    return kv_bytes_per_token(shape, element_size=element_size) * visible_keys(context, density=density, window=window)


def layout_density(shape: Shape, layout: Layout) -> float:
    """Share of the layout's KV heads that are global. Raises ``UserError`` if it is for another shape."""
    check_grid(f"layout '{layout.strategy}'", layout.grid, "the model", shape.grid)
    return layout.num_global / layout.num_heads
