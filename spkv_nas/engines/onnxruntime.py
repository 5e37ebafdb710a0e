"""Describe ONNX Runtime GenAI."""

from __future__ import annotations

from spkv_nas.engines.engine import OTHER_LAYERS, REFUSED, SPKV_FORMS, Cell, Engine, Outcome, tried_with


class OnnxRuntime(Engine):
    """ONNX Runtime GenAI."""

    name = "onnxruntime"
    title = "ONNX Runtime GenAI 0.18"
    outcomes = dict.fromkeys(
        ("ministral", "gemma3_text", f"gemma3_text{OTHER_LAYERS}", "olmo3", *SPKV_FORMS), REFUSED
    ) | dict.fromkeys(("qwen2", "qwen3"), Cell(Outcome.EXACT, "run without the keys lm_config and model_file"))
    tried = dict.fromkeys(("qwen2", "qwen3"), tried_with())


ONNXRUNTIME = OnnxRuntime()
