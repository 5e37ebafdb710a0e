"""What a layout's key-value cache costs in bytes, and the largest budget of global heads that a memory limit holds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spkv_nas.errors import UserError

ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip
_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


@dataclass(frozen=True)
class CacheCost:
    """Bytes of keys and values; an engine's page rounding and index come on top.

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
        """Bytes of one global KV head: 2 (key and value) x context x D x bytes per number x batch."""
        return 2 * self.context * self.head_dim * ITEM_BYTES[self.dtype] * self.batch

    @property
    def local_head(self) -> int:
        """Bytes of one local KV head, which holds its window."""
        return 2 * min(self.window, self.context) * self.head_dim * ITEM_BYTES[self.dtype] * self.batch

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


def parse_bytes(text: str) -> int:
    """Bytes from ``"2GiB"``, ``"1.5 GB"`` or ``"2000000000"``.

    Raises:
        UserError: not a size, or not above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", text.lower())
    number = float(match[1]) * _UNITS.get(match[2], 0) if match else 0.0
    if not 1 <= number < 2**63:
        raise UserError(f"'{text}' is not a size in bytes; give for example 2GiB, 800MB or 2000000000")
    return int(number)


def format_bytes(number: int) -> str:
    """Such as "1.98 GiB"."""
    value, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
