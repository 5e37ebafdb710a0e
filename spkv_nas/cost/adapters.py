"""Count the parameters of low-rank adapters from the size of a decoder; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from spkv_nas.artifacts.shape import ModelSize

ALL_LINEAR = "all-linear"


def num_adapter_parameters(size: ModelSize, rank: int, targets: str | Sequence[str] = ALL_LINEAR) -> int:
    """Return the number of adapter parameters: per linear layer, the rank times its input plus output channels.

    Args:
        size: size of the decoder.
        rank: rank of the adapters.
        targets: names of linear layers as in Llama. If any name is unknown, all linear layers are counted.
    """
    channels, ffn = size.hidden_size, size.intermediate_size
    q, kv = size.heads.attention_width, size.heads.num_kv_heads * size.heads.head_dim
    widths = dict.fromkeys(("q_proj", "o_proj"), channels + q) | dict.fromkeys(("k_proj", "v_proj"), channels + kv)
    widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), channels + ffn)
    adapted_layers = set(widths) if isinstance(targets, str) or not set(targets) <= set(widths) else set(targets)
    return rank * size.heads.num_layers * sum(widths[name] for name in adapted_layers)
