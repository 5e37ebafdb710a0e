"""Formulas for the cost of attention: FLOPs in Kaplan's accounting and bytes of the KV cache; needs no torch.

SP-KV paper, appendix "Inference efficiency". Both depend only on the mean number of keys that a KV head sees::

    keys  = recent + density * (context - recent),    recent = min(window + sinks, context)
    FLOPs = 2 N + 2 L d_attn keys                     per token, forward
    bytes = 2 L Hkv D element_size keys               of one sequence

Dense attention has density 1; the density of a layout is its share of global heads, and ``window`` here counts its
sink tokens, too (``Layout.local_keys``). With window 0 these are the paper's equations, which neglect the window. Where
layers have a native sliding window, ``keys`` is the mean over layers, and a layer that is local by design holds its
window whatever the density. Kaplan's attention term is the mean over the positions of a causal sequence of ``context``
tokens (4 L d_attn FLOPs per key for queries by keys and scores by values, with half the keys visible on average); a
token decoded at the end of the context costs twice that term. The predictors, about 4 % of 2 N, are not counted.

No formula predicts the time of attention: see ``spkv_nas.cost.calibration``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spkv_nas.artifacts.grid import check_grid
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.local_layers import ConfigLayer, candidate_layers, config_layers, layout_window
from spkv_nas.artifacts.shape import HeadShape, Shape
from spkv_nas.base.errors import UserError
from spkv_nas.base.limits import MAX_WINDOW
from spkv_nas.base.units import ITEM_BYTES, format_bytes


def visible_keys(context: int, *, density: float = 1.0, window: int = 0) -> float:
    """Return the keys that a KV head holds at ``context`` tokens: all in the window, and a share of those before it.

    Raises:
        UserError: a context below 1, a density outside [0, 1] or a negative window.
    """
    _check(context, density, window)
    recent = min(window, context)
    return recent + density * (context - recent)


def mean_visible_keys(context: int, *, density: float = 1.0, window: int = 0) -> float:
    """Return the keys that a query sees, including its own, averaged over a causal sequence of ``context`` tokens.

    (context + 1) / 2 with density 1, and recent - recent (recent - 1) / (2 context) with density 0.

    Raises:
        UserError: as ``visible_keys``.
    """
    _check(context, density, window)
    recent = min(window, context)
    local = recent - recent * (recent - 1) / (2 * context)
    return local + density * ((context + 1) / 2 - local)


def _check(context: int, density: float, window: int) -> None:
    """Check the arguments of ``visible_keys``."""
    if context < 1:
        raise UserError(f"a context must have at least 1 token; found {context}")
    if not 0.0 <= density <= 1.0:
        raise UserError(f"density must lie in [0, 1]; found {density:g}")
    if window < 0:
        raise UserError(f"a window cannot be negative; found {window}")


def attention_flops(shape: HeadShape, context: int, *, density: float = 1.0, window: int = 0) -> float:
    """Return the forward FLOPs of attention per token, 2 L d_attn keys.

    Raises:
        UserError: as ``visible_keys``.
    """
    return 2 * shape.num_layers * shape.attention_width * visible_keys(context, density=density, window=window)


def flops_per_token(shape: Shape, context: int, *, density: float = 1.0, window: int = 0) -> float:
    """Return the forward FLOPs per token: 2 N for the linear layers, plus attention."""
    return 2 * shape.num_parameters + attention_flops(shape, context, density=density, window=window)


def training_flops(shape: Shape, num_tokens: float, block_size: int) -> float:
    """Return the FLOPs of training on blocks of ``block_size`` tokens; a backward pass costs two forward passes.

    This reproduces the paper's table "Main scaling study parameters" within 0.5 % (Llama 3 8B: 3.3 % below).
    """
    return 3 * num_tokens * flops_per_token(shape, block_size)


@dataclass(frozen=True)
class Cost:
    """Cost of attention with a share ``density`` of the keys beyond the window.

    Attributes:
        name: name of the model or layout.
        density: share of the keys beyond the window, in [0, 1], in the layers that are not local by design.
        kv_bytes_per_token: growth of the KV cache per token.
        kv_cache_bytes: KV cache of one sequence.
        attention_flops: forward FLOPs of attention per token.
        total_flops: forward FLOPs per token; None for a mixture of experts.
        decode_seconds: time of attention in all layers per decoded token (``Calibration``); None: unknown.
        prefill_seconds: the same per token of prefill.
    """

    name: str
    density: float
    kv_bytes_per_token: float
    kv_cache_bytes: float
    attention_flops: float
    total_flops: float | None
    decode_seconds: float | None = None
    prefill_seconds: float | None = None


def cost(
    name: str,
    shape: Shape,
    context: int,
    *,
    density: float = 1.0,
    window: int = 0,
    native_windows: Sequence[int | None] = (),
    element_size: int = 2,
) -> Cost:
    """Return the cost of attention, without times.

    Args:
        name: name of the model or layout.
        shape: sizes of the model.
        context: tokens in the cache.
        density: share of the keys beyond the window, in the layers that are not local by design.
        window: visible recent keys of a local head, sink tokens included.
        native_windows: sliding window of each layer in the checkpoint, None for full attention; empty: none has one.
        element_size: bytes per number (2: bfloat16).

    Raises:
        UserError: as ``visible_keys``.
    """
    keys, growth = visible_keys(context, density=density, window=window), density
    if native_windows:
        layers = config_layers(native_windows)
        keys = sum(_layer_keys(layer, context, density, window) for layer in layers) / len(layers)
        grows = [not layer.is_always_local and context <= layer.checkpoint_window for layer in layers]
        growth = density * sum(grows) / len(layers)
    flops = 2 * shape.num_layers * shape.attention_width * keys
    return Cost(
        name=name,
        density=density,
        kv_bytes_per_token=kv_bytes_per_token(shape, density=growth, element_size=element_size),
        kv_cache_bytes=kv_bytes_per_token(shape, element_size=element_size) * keys,
        attention_flops=flops,
        total_flops=2 * shape.num_parameters + flops,
    )


def _layer_keys(layer: ConfigLayer, context: int, density: float, window: int) -> float:
    """Return the keys that a KV head of one layer holds, none beyond the native window."""
    longest = min(context, layout_window(layer, window, is_global=True))
    return visible_keys(longest, density=density, window=layout_window(layer, window, is_global=False))


def head_bytes(keys: float, head_dim: int, element_size: int) -> float:
    """Return the bytes of ``keys`` tokens in the cache of one KV head, keys and values: 2 D element_size keys."""
    return 2 * head_dim * element_size * keys


def kv_bytes_per_token(shape: Shape, *, density: float = 1.0, element_size: int = 2) -> float:
    """Return the bytes by which the KV cache grows per token once the window is full.

    Args:
        shape: sizes of the model.
        density: share of the keys that are kept.
        element_size: bytes per number (2: bfloat16).
    """
    return shape.num_layers * shape.num_kv_heads * head_bytes(density, shape.head_dim, element_size)


def kv_cache_bytes(
    shape: Shape, context: int, *, density: float = 1.0, window: int = 0, element_size: int = 2
) -> float:
    """Return the bytes of the KV cache of one sequence of ``context`` tokens."""
    return kv_bytes_per_token(shape, element_size=element_size) * visible_keys(context, density=density, window=window)


def layout_density(shape: Shape, layout: Layout, native_windows: Sequence[int | None] = ()) -> float:
    """Return the share of global KV heads in a layout, among the layers that are not local by design.

    Raises:
        UserError: the layout has another grid than the model.
    """
    check_grid(f"layout '{layout.strategy}'", layout.grid, "the model", shape.grid)
    counts = layout.global_mask.sum(1)
    candidates = candidate_layers(config_layers(native_windows or [None] * layout.num_layers))
    return int(counts[candidates].sum()) / (len(candidates) * layout.num_kv_heads)


@dataclass(frozen=True)
class CacheCost:
    """Bytes of keys and values in the cache, without page rounding and index.

    Attributes:
        context: tokens per sequence.
        batch: sequences held at once.
        window: visible recent keys of a local head.
        head_dim: D, of keys and of values.
        dtype: of the cache, one of ``ITEM_BYTES``.
        sinks: first tokens that a local head keeps besides its window.
        native_heads: windows of the KV heads that are local by design, whose letter in a layout has no effect.
        global_window: visible recent keys of a global head, if every layer of the model has a native window.
    """

    context: int
    batch: int
    window: int
    head_dim: int
    dtype: str
    sinks: int = 0
    native_heads: tuple[int, ...] = ()
    global_window: int = MAX_WINDOW

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UserError: a number is below 1, or the dtype is unknown.
        """
        for name in ("context", "batch", "window", "head_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1; found {getattr(self, name)}")
        if self.sinks < 0:
            raise UserError(f"--sinks must be at least 0; found {self.sinks}")
        if self.dtype not in ITEM_BYTES:
            raise UserError(f"--kv-dtype '{self.dtype}' is unknown; expected one of {', '.join(ITEM_BYTES)}")

    @property
    def global_head(self) -> int:
        """Return the bytes of one global KV head, over all sequences."""
        return self._head(self.global_window)

    @property
    def local_head(self) -> int:
        """Return the bytes of one local KV head, which stores only its window and sink tokens, over all sequences."""
        return self._head(self.window + self.sinks) if self.window < self.global_window else self.global_head

    def total(self, num_global: int, num_heads: int) -> int:
        """Return the bytes of a model with ``num_global`` of ``num_heads`` KV heads global."""
        num_local = num_heads - num_global - len(self.native_heads)
        native = sum(self._head(window) for window in self.native_heads)
        return num_global * self.global_head + num_local * self.local_head + native

    def largest_budget(self, limit: int, num_heads: int) -> int:
        """Return the largest number of global heads, up to all that can be, whose cache fits in ``limit`` bytes.

        Raises:
            UserError: not even one global head fits.
        """
        extra = self.global_head - self.local_head
        spare = limit - self.total(0, num_heads)
        candidates = num_heads - len(self.native_heads)
        number = candidates if spare >= extra * candidates else max(0, spare) // max(1, extra)
        if number < 1:
            raise UserError(
                f"{format_bytes(limit)} is too small for a global KV head: {num_heads} local heads need "
                f"{format_bytes(self.total(0, num_heads))}, a global head {format_bytes(extra)} more\n"
                "use more memory, a shorter --context, a smaller --batch or another --kv-dtype"
            )
        return int(number)

    def _head(self, reach: int) -> int:
        """Return the bytes of one KV head that keeps up to ``reach`` keys, over all sequences."""
        return self.batch * int(head_bytes(min(reach, self.context), self.head_dim, ITEM_BYTES[self.dtype]))
