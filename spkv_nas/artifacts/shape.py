"""The heads of a decoder, and what its cost depends on besides."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.artifacts.grid import Grid


@dataclass(frozen=True)
class HeadShape:
    """The heads of a decoder: L, Hq, Hkv, D."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def grid(self) -> Grid:
        """(L, Hkv)."""
        return self.num_layers, self.num_kv_heads

    @property
    def attention_width(self) -> int:
        """d_attn = Hq * D."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class Shape(HeadShape):
    """What cost depends on: the heads, and N, the parameters without the embeddings."""

    num_parameters: int
