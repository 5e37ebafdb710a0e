"""Published ``config.json`` contents of models too large to load in a test, reduced to what decides shapes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "Llama-3-70B": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "max_window_layers": 36, "sliding_window": None,
        "use_sliding_window": False, "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "Mistral-Small-24B": {
        "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "max_position_embeddings": 32768, "sliding_window": None, "rope_theta": 100000000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "Gemma-3-12B": {  # which sees images too
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
        "torch_dtype": "bfloat16",
    },
}  # fmt: skip
BILLIONS = {  # of parameters, as their cards say
    "Llama-3-8B": 8.03, "Llama-3-70B": 70.6, "Qwen3-8B": 8.19, "Mistral-Small-24B": 23.6, "Gemma-3-12B": 12.2,
}  # fmt: skip


def published(name: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of one of these models, with some keys changed."""
    content = {**CONFIGS[name], **changes}
    return AutoConfig.for_model(content.pop("model_type"), **content)


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Create a model on the meta device, without memory for its weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model
