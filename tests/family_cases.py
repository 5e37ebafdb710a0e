"""Options of tiny models of families whose layers store more than keys and values, share them, or have windows."""

from __future__ import annotations

from typing import Any

LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    "pad_token_id": 0,
}  # fmt: skip
CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}
ZAMBA: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4, "mamba_d_state": 8,
    "attention_head_dim": 16, "attention_hidden_size": 64, "pad_token_id": 0,
}  # fmt: skip
SHARED: dict[str, Any] = {  # layers 4 and 5 read the keys of 2 and 3
    "head_dim": 8, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 10, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": CONV,
    "falcon_h1": {**MAMBA, "head_dim": 8, "mamba_d_ssm": 64},
    "qwen3_5_text": LINEAR,
    "mistral": {"sliding_window": 12},
    "gemma4_text": {**SHARED, "global_head_dim": 8},
    "youtu": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}  # fmt: skip
SLOW: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": {**LINEAR, **EXPERTS},
    "minimax": {**LINEAR, "block_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen3_next": {**LINEAR, **EXPERTS},
    "olmo_hybrid": LINEAR,
    "lfm2_moe": {**CONV, **EXPERTS, "num_dense_layers": 1},
    "lfm3": {**CONV, **EXPERTS, "num_dense_layers": 1, "pad_token_id": 0},
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2, "num_experts_per_tok": 1,
        "shared_intermediate_size": 24,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 4, "pad_token_id": 0,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "attention"], "head_dim": 8, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16, "pad_token_id": 0,
    },
    "kimi_linear": {
        **LINEAR, "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 2, **EXPERTS, "num_local_experts": 2,
    },
    "zaya": {"head_dim": 8, "num_experts": 2, "moe_intermediate_size": 24},
    "zamba": {**ZAMBA, "n_mamba_heads": 2, "mamba_dt_rank": 4},
    "zamba2": {**ZAMBA, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 16, "num_mem_blocks": 1},
    "gemma3n_text": {
        **SHARED, "intermediate_size": [48] * 6, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 6,
    },
    "phi3": {"sliding_window": 12, "pad_token_id": 0},
    "mixtral": {"sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 1},
    "starcoder2": {"sliding_window": 12},
}  # fmt: skip
# Families with layers that keep a state besides keys and values
STATES = [
    *("lfm2", "falcon_h1", "qwen3_5_text"),
    *(f for f in SLOW if f not in ("gemma3n_text", "phi3", "mixtral", "starcoder2")),
]
