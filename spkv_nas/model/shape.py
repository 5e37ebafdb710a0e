"""How many layers and heads a Hugging Face config says, in the words of its own family."""

from __future__ import annotations

from transformers import PreTrainedConfig

from spkv_nas.artifacts.shape import HeadShape


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
