"""The variants of a dense checkpoint that are trained and compared: full attention, SP-KV, and hybrid layouts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV
from spkv_nas.artifacts.layout import Layout


class Kind(Enum):
    """How the heads of a variant attend."""

    FULL_ATTENTION = "every key"
    SP_KV = "a window, and keys that gates keep"
    HYBRID = "every key or a window, as a layout says"


@dataclass(frozen=True)
class Variant:
    """What a branch of the dense checkpoint attends with; ``layout`` is there for a hybrid alone.

    ``name`` stands in logs, records and folder names; of a hybrid it is the layout's strategy.
    """

    kind: Kind
    name: str
    layout: Layout | None = None

    @classmethod
    def full_attention(cls) -> Variant:
        """The reference that all others are compared with."""
        return cls(Kind.FULL_ATTENTION, FULL_ATTENTION)

    @classmethod
    def sp_kv(cls) -> Variant:
        """Gates on the heads that the recipe names."""
        return cls(Kind.SP_KV, SP_KV)

    @classmethod
    def hybrid(cls, layout: Layout) -> Variant:
        """Global and local heads."""
        return cls(Kind.HYBRID, layout.strategy, layout)

    @property
    def key(self) -> str:
        """First part of a branch's folder name; it names finished runs, so it must stay as it is."""
        return self.name if self.layout is None else f"{self.name}-{self.layout.content_hash}"

    def density(self, measured: float | None) -> float:
        """Share of keys outside the window that are kept: of a hybrid its global heads, of full attention all.

        ``measured`` is that of its gates; None where it has none.
        """
        if self.layout is not None:
            return self.layout.num_global / self.layout.num_heads
        return 1.0 if measured is None else measured
