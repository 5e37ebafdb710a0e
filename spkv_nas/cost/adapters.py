"""How many parameters low-rank adapters have on a decoder, by its size alone; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from spkv_nas.artifacts.shape import ModelSize

ALL_LINEAR = "all-linear"


def num_adapter_parameters(size: ModelSize, rank: int, targets: str | Sequence[str] = ALL_LINEAR) -> int:
    """Parameters of adapters of a rank: of each linear layer the rank times the channels on both sides of it.

    By the names that a Llama's layers have; where another is among ``targets``, all are counted.
    """
    channels, ffn = size.hidden_size, size.intermediate_size
    q, kv = size.heads.attention_width, size.heads.num_kv_heads * size.heads.head_dim
    widths = dict.fromkeys(("q_proj", "o_proj"), channels + q) | dict.fromkeys(("k_proj", "v_proj"), channels + kv)
    widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), channels + ffn)
    named = set(widths) if isinstance(targets, str) or not set(targets) <= set(widths) else set(targets)
    return rank * size.heads.num_layers * sum(widths[name] for name in named)
