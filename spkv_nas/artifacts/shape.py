"""Sizes of a decoder that its heads and its cost depend on."""

from dataclasses import dataclass, field

from spkv_nas.artifacts.grid import Grid, grid_words


@dataclass(frozen=True)
class HeadShape:
    """Attention heads of a decoder."""

    num_layers: int  # attention layers L, without those that read another layer's keys
    num_heads: int  # query heads per layer Hq
    num_kv_heads: int  # KV heads per layer Hkv in the cache, of the largest layer
    # channels of a head D in the cache, the most of its keys and its values, in the layer where it is largest
    head_dim: int
    # KV heads of each layer if they differ
    layer_heads: tuple[int, ...] = field(default=(), kw_only=True)
    # Channels of a head in each layer if they differ
    layer_dims: tuple[int, ...] = field(default=(), kw_only=True)
    # channels of a head in a pass, if layers expand all heads from a latent, which is their one KV head; 0: none does
    expanded_dim: int = field(default=0, kw_only=True)

    @property
    def grid(self) -> Grid:
        """Return (L, Hkv)."""
        return self.num_layers, self.num_kv_heads

    @property
    def heads_per_layer(self) -> tuple[int, ...]:
        """Return the number of KV heads of every layer."""
        return self.layer_heads or (self.num_kv_heads,) * self.num_layers

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Return the channels of a head of every layer."""
        return self.layer_dims or (self.head_dim,) * self.num_layers

    @property
    def kv_heads_by_layer(self) -> tuple[float, ...]:
        """Return the KV heads of every layer, counted in heads of ``head_dim`` channels."""
        pairs = zip(self.heads_per_layer, self.head_dims, strict=True)
        return tuple(heads * (size / self.head_dim) for heads, size in pairs)

    @property
    def attention_width(self) -> int:
        """Return d_attn = Hq * D of a pass."""
        return self.num_heads * (self.expanded_dim or self.head_dim)

    @property
    def kv_width(self) -> int:
        """Return the channels of all keys of a layer in a pass."""
        return self.attention_width if self.expanded_dim else self.num_kv_heads * self.head_dim

    @property
    def words(self) -> str:
        """Return layers and heads in words: "21 layers x 3 KV heads of size 64", "27 layers x 1 latent of size 576"."""
        if self.expanded_dim:
            return f"{self.num_layers} layers x 1 latent of size {2 * self.head_dim}"
        return f"{grid_words(self.heads_per_layer)} of size {self.head_dim}"


@dataclass(frozen=True)
class Shape(HeadShape):
    """Sizes that the FLOP formulas depend on."""

    num_parameters: int  # N, without embeddings


@dataclass(frozen=True)
class ModelSize:
    """Size of a decoder, without gate predictors."""

    heads: HeadShape  # layers and heads
    num_parameters: int  # of the whole model
    without_embeddings: (
        int  # N, parameters of layers and norms, which every token passes; excludes vision encoders
    )
    hidden_size: int  # channels of a token
    intermediate_size: int  # channels of a layer's FFN
    vocabulary: int  # vocabulary size V of the logits
    positions: int | None  # context length that it was trained for; None if the config does not say
    # Layers with full attention; the others have a sliding window by design and are not gated
    num_full: int
    sliding_window: int = 0  # sliding window of those other layers, in keys
    # Whether it is a mixture of experts, where a token uses only a part of the parameters
    is_mixture: bool = False
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
        return Shape(**vars(self.heads), num_parameters=self.without_embeddings)

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
