"""What attention costs: FLOPs in Kaplan's accounting, bytes of the KV cache, and what says its time; needs no torch.

SP-KV paper, appendix "Inference efficiency". In both, all that matters is how many keys a KV head sees on average::

    keys  = recent + density * (context - recent),    recent = min(window, context)
    FLOPs = 2 N + 2 L d_attn keys                     per token, forward
    bytes = 2 L Hkv D element_size keys               of one sequence

so dense attention is density 1, and a layout is the share of its global heads. With window 0 these are the paper's
equations, which leave the window out. Kaplan's attention term is the mean over the positions of a causal sequence of
``context`` tokens (queries by keys and scores by values, 4 L d_attn per key, over half the keys on average); a token
decoded at the end of the context costs twice that term. The predictors, some 4 % of 2 N, are not counted.

Time is either measured (``spkv_nas.calibration``) or a bound from below (``spkv_nas.roofline``); both are an
``AttentionTimes``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from spkv_nas.errors import UserError
from spkv_nas.layout import Layout
from spkv_nas.sizes import ITEM_BYTES, format_bytes

Phase = Literal["decode", "prefill"]


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
    """What attention with ``density`` beyond the window costs; FLOPs are forward, per token.

    ``decode_seconds`` and ``prefill_seconds`` are those of the attention of all layers, per token; None: unknown.
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


class AttentionTimes(ABC):
    """How long attention takes, and from where that is known; for tables, and as the objective of a search."""

    @property
    @abstractmethod
    def num_kv_heads(self) -> int:
        """KV heads of a layer, Hkv."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Where the times come from, for people: what they were measured on, or that they are a bound."""

    @abstractmethod
    def layer_seconds(self, context: int, *, density: float = 1.0, window: int = 0, phase: Phase = "decode") -> float:
        """Seconds per token of the attention of one layer.

        Args:
            context: tokens in the cache when decoding, tokens of the whole sequence in prefill.
            density: share of the layer's KV heads that are global, the others seeing the window alone; a head that
                keeps a share of its keys counts as that share of a global head.
            window: w of the local heads; means nothing with density 1.
            phase: "decode" (one token after another) or "prefill" (a sequence at once).

        Raises:
            UserError: a number out of range, or nothing is known there.
        """

    def covers(self, context: int, phase: Phase) -> bool:
        """Whether times are known at ``context``."""
        return True

    def layout_seconds(self, layout: Layout, context: int, phase: Phase = "decode") -> float:
        """Seconds per token of the attention of all layers with ``layout``: the sum of ``layer_seconds``.

        Raises:
            UserError: the layout has another number of KV heads per layer; as ``layer_seconds`` does.
        """
        if layout.num_kv_heads != self.num_kv_heads:
            raise UserError(
                f"layout '{layout.strategy}' has {layout.num_kv_heads} KV heads per layer, "
                f"the times are for {self.num_kv_heads}"
            )
        layers = Counter(row.count("G") for row in layout.heads)
        return sum(
            number
            * self.layer_seconds(context, density=num_global / self.num_kv_heads, window=layout.window, phase=phase)
            for num_global, number in sorted(layers.items())
        )
