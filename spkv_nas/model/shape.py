"""How many layers and heads a Hugging Face config says, in the words of its own family."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

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


def config_shape(config: PreTrainedConfig) -> HeadShape:
    """The heads of the decoder that ``config`` describes; a config without KV heads means one for each query head."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    return HeadShape(
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
    )
