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


@dataclass(frozen=True)
class ModelSize:
    """How large a decoder is, predictors aside.

    Attributes:
        heads: its layers and heads.
        num_parameters: of the whole model.
        without_embeddings: N, those of layers and norms, which every token passes; what sees images aside too.
        hidden_size, intermediate_size: channels of a token, and of the FFN of a layer.
        vocabulary: tokens V that it has logits of.
        positions: tokens that it was made for; None where the config does not say.
        num_full: layers whose heads see all tokens; gates pass by the others, which see ``own_window`` keys by design.
        is_mixture: of experts, of which a token passes a part alone.
    """

    heads: HeadShape
    num_parameters: int
    without_embeddings: int
    hidden_size: int
    intermediate_size: int
    vocabulary: int
    positions: int | None
    num_full: int
    own_window: int = 0
    is_mixture: bool = False

    @property
    def shape(self) -> Shape:
        """What cost depends on."""
        heads = self.heads
        return Shape(heads.num_layers, heads.num_heads, heads.num_kv_heads, heads.head_dim, self.without_embeddings)

    @property
    def num_multiplied(self) -> int:
        """Parameters that a token is multiplied with: N, and those of the logits."""
        return self.without_embeddings + self.vocabulary * self.hidden_size

    @property
    def own_density(self) -> float:
        """Share of the layers whose heads see all tokens."""
        return self.num_full / self.heads.num_layers
