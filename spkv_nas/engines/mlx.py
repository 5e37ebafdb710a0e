"""Describe mlx-lm, which reads ``layer_types`` in few of its classes."""

from __future__ import annotations

from typing import ClassVar

from spkv_nas.engines.engine import (
    BASES,
    EXACT,
    OTHER_LAYERS,
    PROGRAMS,
    REFUSED,
    SCALED,
    SPKV_FORMS,
    Cell,
    Engine,
    Outcome,
    Program,
    tried_with,
)


class Mlx(Engine):
    """mlx-lm. It imports the module that ``model_file`` names, if that is allowed."""

    name = "mlx"
    title = "mlx-lm 0.32.2"
    outcomes = dict.fromkeys(
        ("ministral", "qwen2", "qwen3", f"gemma3_text{OTHER_LAYERS}", f"cohere2{OTHER_LAYERS}", "exaone4",
         "granite_swa", *SPKV_FORMS), REFUSED,
    ) | {
        "gemma3_text": Cell(Outcome.EXACT, "tokens equal, log-probabilities within 4e-4"),
        "olmo3": EXACT,
        "smollm3": Cell(Outcome.EXACT, "without saving memory: its cache keeps all keys"),
    }  # fmt: skip
    tried: ClassVar = {
        "smollm3": tried_with(
            "rope_theta", "tie_word_embeddings", "attention_bias", "mlp_bias", "no_rope_layers", rope_type=SCALED
        ),
        "olmo3": tried_with("rope_theta", "tie_word_embeddings", "attention_bias", rope_type=("yarn",)),
        "gemma3_text": tried_with(*BASES, "query_pre_attn_scalar", "tie_word_embeddings", rope_type=SCALED),
    }
    ignores_windows = ("qwen2", "qwen3", f"gemma3_text{OTHER_LAYERS}", f"cohere2{OTHER_LAYERS}")
    guard_key = "model_file"
    program = Program(PROGRAMS / "run_mlx.py", "mlx_lm")


MLX = Mlx()
