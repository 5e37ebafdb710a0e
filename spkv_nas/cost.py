"""What attention costs: FLOPs in Kaplan's accounting, and bytes of the KV cache; needs no torch.

SP-KV paper, appendix "Inference efficiency". In both, all that matters is how many keys a KV head sees on average::

    keys  = recent + density * (context - recent),    recent = min(window, context)
    FLOPs = 2 N + 2 L d_attn keys                     per token, forward
    bytes = 2 L Hkv D element_size keys               of one sequence

so dense attention is density 1, and a layout is the share of its global heads. With window 0 these are the paper's
equations, which leave the window out. Kaplan's attention term is the mean over the positions of a causal sequence of
``context`` tokens (queries by keys and scores by values, 4 L d_attn per key, over half the keys on average); a token
decoded at the end of the context costs twice that term. The predictors, some 4 % of 2 N, are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spkv_nas.errors import UserError
from spkv_nas.layout import Layout
from spkv_nas.sizes import ITEM_BYTES, format_bytes


@dataclass(frozen=True)
class Shape:
    """What cost depends on in a decoder: N (parameters without the embeddings), L, Hq, Hkv, D."""

    num_parameters: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def attention_width(self) -> int:
        """d_attn = Hq * D."""
        return self.num_heads * self.head_dim


def visible_keys(context: int, *, density: float = 1.0, window: int = 0) -> float:
    """Keys that a KV head holds at ``context`` tokens: all in the window, a share of those before it.

    Raises:
        UserError: a context below 1, a density outside [0, 1] or a negative window.
    """
    if context < 1:
        raise UserError(f"a context has at least 1 token; found {context}")
    if not 0.0 <= density <= 1.0:
        raise UserError(f"density is a share of tokens, in [0, 1]; found {density:g}")
    if window < 0:
        raise UserError(f"a window cannot be negative; found {window}")
    recent = min(window, context)
    return recent + density * (context - recent)


def attention_flops(shape: Shape, context: int, *, density: float = 1.0, window: int = 0) -> float:
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
    """What attention with ``density`` beyond the window costs; FLOPs are forward, per token."""

    name: str
    density: float
    kv_bytes_per_token: float
    kv_cache_bytes: float
    attention_flops: float
    total_flops: float


def cost(
    name: str, shape: Shape, context: int, *, density: float = 1.0, window: int = 0, element_size: int = 2
) -> Cost:
    """All of it at once. Raises ``UserError`` as ``visible_keys`` does."""
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
    if (layout.num_layers, layout.num_kv_heads) != (shape.num_layers, shape.num_kv_heads):
        raise UserError(
            f"layout '{layout.strategy}' is for {layout.num_layers} layers x {layout.num_kv_heads} KV heads, "
            f"the model has {shape.num_layers} x {shape.num_kv_heads}"
        )
    return layout.num_global / layout.num_heads


@dataclass(frozen=True)
class CacheCost:
    """Bytes of keys and values that an engine holds at once; its page rounding and index come on top.

    Attributes:
        context: tokens per sequence.
        batch: sequences held at once.
        window: visible recent keys of a local head.
        head_dim: D, of keys and of values.
        dtype: of the cache, one of ``ITEM_BYTES``.
    """

    context: int
    batch: int
    window: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        """Raises ``UserError`` for a number below 1 or an unknown dtype."""
        for name in ("context", "batch", "window", "head_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1; found {getattr(self, name)}")
        if self.dtype not in ITEM_BYTES:
            raise UserError(f"--dtype '{self.dtype}' is unknown; known are {', '.join(ITEM_BYTES)}")

    @property
    def global_head(self) -> int:
        """Bytes of one global KV head, of all sequences."""
        return self._head(density=1.0)

    @property
    def local_head(self) -> int:
        """Bytes of one local KV head, which holds its window, of all sequences."""
        return self._head(density=0.0)

    def total(self, num_global: int, num_heads: int) -> int:
        """Bytes of a model with ``num_global`` of ``num_heads`` KV heads global."""
        return num_global * self.global_head + (num_heads - num_global) * self.local_head

    def largest_budget(self, limit: int, num_heads: int) -> int:
        """The largest number of global heads, up to all, whose cache is at most ``limit`` bytes.

        Raises:
            UserError: not even one global head fits.
        """
        extra = self.global_head - self.local_head
        spare = limit - self.total(0, num_heads)
        number = num_heads if spare >= extra * num_heads else max(0, spare) // max(1, extra)
        if number < 1:
            raise UserError(
                f"{format_bytes(limit)} holds no global KV head: {num_heads} local ones take "
                f"{format_bytes(self.total(0, num_heads))}, each global one {format_bytes(extra)} more\n"
                "give more memory, a shorter --context, a smaller --batch or another --dtype"
            )
        return int(number)

    def _head(self, density: float) -> int:
        keys = visible_keys(self.context, density=density, window=self.window)
        return self.batch * int(head_bytes(keys, self.head_dim, ITEM_BYTES[self.dtype]))
