"""Attention variants of a dense checkpoint to train and compare: full attention, SP-KV, and hybrid layouts."""

from dataclasses import dataclass
from enum import Enum

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV
from spkv_nas.artifacts.layout import Layout


class Kind(Enum):
    """Kind of attention that the heads of a variant use."""

    FULL_ATTENTION = "every key"
    SP_KV = "a window, and keys that gates keep"
    HYBRID = "every key or a window, as a layout says"


@dataclass(frozen=True)
class Variant:
    """Attention of one branch of the dense checkpoint."""

    kind: Kind  # kind of attention
    name: str  # name in logs, records and folder names; the layout's strategy for a hybrid
    layout: Layout | None = None  # the layout of a hybrid, otherwise None

    @classmethod
    def full_attention(cls) -> "Variant":
        """Return the full-attention variant, the control of all comparisons."""
        return cls(Kind.FULL_ATTENTION, FULL_ATTENTION)

    @classmethod
    def sp_kv(cls) -> "Variant":
        """Return the SP-KV variant, with gates on the heads that the recipe names."""
        return cls(Kind.SP_KV, SP_KV)

    @classmethod
    def hybrid(cls, layout: Layout) -> "Variant":
        """Return a hybrid variant with the global and local heads of ``layout``."""
        return cls(Kind.HYBRID, layout.strategy, layout)

    @property
    def key(self) -> str:
        """Return the first part of a branch's folder name; finished runs are found by it, so it must not change."""
        return self.name if self.layout is None else f"{self.name}-{self.layout.content_hash}"

    def density(self, measured: float | None) -> float:
        """Return the share of keys outside the window that are kept, for gates the ``measured`` one."""
        if self.layout is not None:
            return self.layout.num_global / self.layout.num_heads
        return 1.0 if measured is None else measured
