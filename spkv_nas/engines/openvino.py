"""Describe OpenVINO GenAI."""

from __future__ import annotations

from spkv_nas.engines.engine import OTHER_LAYERS, REFUSED, SPKV_FORMS, Cell, Engine, Outcome, tried_with


class OpenVino(Engine):
    """OpenVINO GenAI."""

    name = "openvino"
    title = "OpenVINO GenAI 2026.4.1"
    outcomes = dict.fromkeys(
        ("ministral", "gemma3_text", f"gemma3_text{OTHER_LAYERS}", "olmo3", *SPKV_FORMS), REFUSED
    ) | dict.fromkeys(("qwen2", "qwen3"), Cell(Outcome.EXACT, "run without the keys lm_config and model_file"))
    tried = dict.fromkeys(("qwen2", "qwen3"), tried_with())


OPENVINO = OpenVino()
