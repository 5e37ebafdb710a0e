"""Sizes of a decoder that its heads and its cost depend on."""

from dataclasses import dataclass

from spkv_nas.artifacts.grid import Grid


@dataclass(frozen=True)
class HeadShape:
    """Attention heads of a decoder."""

    num_layers: int  # attention layers L, without those that read another layer's keys
    num_heads: int  # query heads per layer Hq
    num_kv_heads: int  # KV heads per layer Hkv
    head_dim: int  # channels of a head D

    @property
    def grid(self) -> Grid:
        """Return (L, Hkv)."""
        return self.num_layers, self.num_kv_heads

    @property
    def attention_width(self) -> int:
        """Return d_attn = Hq * D."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class Shape(HeadShape):
    """Sizes that the FLOP formulas depend on."""

    num_parameters: int  # N, without embeddings


@dataclass(frozen=True)
class ModelSize:
    """Size of a decoder, without gate predictors."""

    heads: HeadShape  # layers and heads
    num_parameters: int  # of the whole model
    without_embeddings: int  # N, parameters of layers and norms, which every token passes; excludes vision encoders
    hidden_size: int  # channels of a token
    intermediate_size: int  # channels of a layer's FFN
    vocabulary: int  # vocabulary size V of the logits
    positions: int | None  # context length that it was trained for; None if the config does not say
    num_full: int  # layers with full attention; the others have a sliding window by design and are not gated
    sliding_window: int = 0  # sliding window of those other layers, in keys
    is_mixture: bool = False  # whether it is a mixture of experts, where a token uses only a part of the parameters
    # sliding window of each layer in keys, None for full attention; empty if no layer has one
    native_windows: tuple[int | None, ...] = ()
    num_other_layers: int = 0  # layers without attention, or with the keys of another layer

    @property
    def num_decoder_layers(self) -> int:
        """Return the number of all layers."""
        return self.heads.num_layers + self.num_other_layers

    @property
    def shape(self) -> Shape:
        """Return the sizes that the FLOP formulas depend on."""
        heads = self.heads
        return Shape(heads.num_layers, heads.num_heads, heads.num_kv_heads, heads.head_dim, self.without_embeddings)

    @property
    def num_sliding(self) -> int:
        """Return the number of layers with a sliding window by design."""
        return self.heads.num_layers - self.num_full

    @property
    def num_multiplied(self) -> int:
        """Return the number of parameters that a token is multiplied with: N, and those of the logits."""
        return self.without_embeddings + self.vocabulary * self.hidden_size

    @property
    def full_attention_share(self) -> float:
        """Return the share of layers with full attention."""
        return self.num_full / self.heads.num_layers
