"""Layer-wise hybrids as stock architectures, which plain ``transformers`` and serving engines load.

A layout whose layers are all-global or all-local can be written with ``layer_types`` and ``sliding_window``
(Hugging Face counts the query's own key in the window, as this package does). Llama and Mistral weights become a
Qwen2 model with zero q/k/v biases, because the Llama classes ignore ``layer_types``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError

_NATIVE = ("qwen2", "qwen3", "smollm3", "gemma3_text", "olmo3", "cohere2")  # read layer_types themselves
_AS_QWEN2 = ("llama", "mistral")
_SHARED_WITH_QWEN2 = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def stock_obstacle(model: PreTrainedModel, layout: Layout) -> str | None:
    """Why the layout cannot be expressed as a stock architecture; None if it can."""
    if not layout.is_layerwise:
        mixed = [i for i, row in enumerate(layout.heads) if len(set(row)) > 1]
        return f"layers {', '.join(map(str, mixed))} mix global and local heads, which layer_types cannot say"
    kind = model.config.model_type
    if kind not in (*_NATIVE, *_AS_QWEN2):
        return f"no stock architecture with layer_types is known for model type '{kind}'"
    if kind in _AS_QWEN2 and (
        getattr(model.config, "attention_bias", False) or getattr(model.config, "mlp_bias", False)
    ):
        return "Qwen2 has no output-projection or MLP biases, which this model uses"
    return None


def to_stock(model: PreTrainedModel, layout: Layout) -> PreTrainedModel:
    """A stock model with the weights of the ungated, unhooked ``model`` and the layout's layers.

    Raises:
        UserError: ``stock_obstacle`` finds one.
    """
    obstacle = stock_obstacle(model, layout)
    if obstacle is not None:
        raise UserError(f"this layout has no stock form: {obstacle}")
    kinds = ["full_attention" if "G" in row else "sliding_attention" for row in layout.heads]
    options: dict[str, Any] = {
        "layer_types": kinds,
        "sliding_window": layout.window,
        "use_sliding_window": True,
        "max_window_layers": 0,
    }
    config = model.config
    if config.model_type in _NATIVE:
        options = {**config.to_dict(), **options}
        target = AutoConfig.for_model(**options)
    else:
        shared = {key: getattr(config, key) for key in _SHARED_WITH_QWEN2 if getattr(config, key, None) is not None}
        target = AutoConfig.for_model("qwen2", **shared, **options)
    stock: PreTrainedModel = AutoModelForCausalLM.from_config(target, dtype=model.dtype)
    weights = dict(model.state_dict())
    for name, parameter in stock.state_dict().items():
        if name not in weights and name.endswith((".q_proj.bias", ".k_proj.bias", ".v_proj.bias")):
            weights[name] = torch.zeros_like(parameter)
    stock.load_state_dict(weights)
    stock.generation_config = model.generation_config
    return stock.to(model.device).eval()
