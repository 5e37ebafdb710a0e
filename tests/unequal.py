"""Tiny random models whose heads differ in number or size, and their logits under an explicit mask per head."""

from __future__ import annotations

from typing import Any

import torch
from helpers import logits, sharpen_attention, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}  # fmt: skip
_MIXTURE: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
UNEQUAL: dict[str, dict[str, Any]] = {  # options of models; the experts can be computed in float64
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "deepseek_v3": {**_LATENT, **_MIXTURE, "topk_group": 1, "experts_implementation": "eager"},
}


def unequal_model(family: str) -> PreTrainedModel:
    """Make a model of ``UNEQUAL`` whose attention is far from uniform."""
    model = sharpen_attention(tiny_model(family, vocab_size=300, **UNEQUAL[family]), 4.0)
    model.generation_config.eos_token_id = None
    return model


def masked_logits(model: PreTrainedModel, layout: Layout, native: tuple[int | None, ...], tokens: Tensor) -> Tensor:
    """Compute logits of a dense model under the explicit mask of a layout; ``native`` windows stay as they are."""
    model.set_attn_implementation("eager")
    layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    t, s = torch.arange(tokens.shape[1])[:, None], torch.arange(tokens.shape[1])
    for layer, windows, fixed in zip(layers, layout.head_windows, native, strict=True):
        group = model.config.num_attention_heads // len(windows)
        seen = [
            (t - s < fixed) if fixed else (t - s < (window or len(t))) | (s < layout.sinks)
            for window in windows
            for _ in range(group)
        ]
        mask = torch.where(torch.stack(seen) & (s <= t), 0.0, -torch.inf)[None].double()
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
        )
    return logits(model, tokens)
