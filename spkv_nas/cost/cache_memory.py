"""Memory of the KV cache when a model with a layout is served, and the largest budget of global heads that fits.

Sizes are in whole bytes, for one context length and batch; ``formulas`` has the cost per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.base.errors import UserError
from spkv_nas.base.limits import MAX_WINDOW
from spkv_nas.base.units import ITEM_BYTES, format_bytes
from spkv_nas.cost.formulas import head_bytes


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
