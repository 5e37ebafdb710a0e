"""What cost depends on in a decoder: its size and its heads."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.artifacts.grid import Grid


@dataclass(frozen=True)
class Shape:
    """What cost depends on in a decoder: N (parameters without the embeddings), L, Hq, Hkv, D."""

    num_parameters: int
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
