"""Test exported configs of real models, from their published configs alone: what inference engines read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from configs import CONFIGS, on_meta, published
from marks import slow
from transformers import AutoConfig, PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.model.export.native import native_config, write_native_config
from spkv_nas.model.export.target import TargetError
from spkv_nas.model.model_shape import config_shape
from spkv_nas.model.windows import apply_layout

FULL, SLIDING = "full_attention", "sliding_attention"
CLASSES = {
    "Llama-3-8B": ("ministral", "MinistralForCausalLM"),
    "Llama-3-70B": ("ministral", "MinistralForCausalLM"),
    "Qwen3-8B": ("qwen3", "Qwen3ForCausalLM"),
    "Mistral-Small-24B": ("ministral", "MinistralForCausalLM"),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


def layerwise(model: PreTrainedModel) -> Layout:
    """Return a layout with a global layer after every three local ones."""
    num_layers, num_heads = config_shape(model.config).grid
    return Layout(
        tuple(("G" if layer % 4 == 3 else "L") * num_heads for layer in range(num_layers)),
        window=128,
    )


@pytest.mark.parametrize(
    "name", [slow(name) if name == "Llama-3-70B" else name for name in CLASSES]
)
def test_a_native_config_is_complete(name: str, tmp_path: Path) -> None:
    """Kinds of layers, window, sizes and positions are as published, and tensors are those of the files."""
    model = on_meta(published(name, num_hidden_layers=8))
    tensors = {key: value.shape for key, value in model.state_dict().items()}
    chosen = layerwise(model)
    apply_layout(model, chosen)
    write_native_config(native_config(model.config, chosen), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    original = {**CONFIGS[name], "num_hidden_layers": 8}

    kind, architecture = CLASSES[name]
    assert (content["model_type"], content["architectures"]) == (kind, [architecture])
    assert content["layer_types"] == [
        FULL if set(row) == {"G"} else SLIDING for row in chosen.heads
    ]
    assert content["sliding_window"] == 128
    if kind == "qwen3":
        assert content["use_sliding_window"] is True
        assert content["max_window_layers"] == 0
    sizes = original.keys() - {
        "model_type",
        "torch_dtype",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
    }
    # rope_theta among them
    assert {key: content[key] for key in sizes} == {key: original[key] for key in sizes}
    assert content["head_dim"] == original.get(
        "head_dim", original["hidden_size"] // original["num_attention_heads"]
    )
    assert content["dtype"] == original["torch_dtype"]
    assert "spkv" not in content

    again = AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == {"rope_theta": original["rope_theta"], "rope_type": "default"}
    assert {key: value.shape for key, value in on_meta(again).state_dict().items()} == tensors


def test_scaled_positions_have_old_and_new_keys(tmp_path: Path) -> None:
    """Configs have the keys of transformers 5 and 4, so that no engine uses the default."""
    config = published("Llama-3-8B", rope_scaling=dict(YARN))
    write_native_config(native_config(config, layerwise(on_meta(config))), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["rope_theta"], content["rope_scaling"]) == (500000.0, YARN)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == {**YARN, "rope_theta": 500000.0}


def test_a_multimodal_model_gets_the_custom_type(tmp_path: Path) -> None:
    """The layers are in the part of its config for text."""
    model = on_meta(published("Gemma-3-12B"))
    chosen = layerwise(model)
    apply_layout(model, chosen)
    with pytest.raises(TargetError, match="'gemma3'"):
        native_config(model.config, chosen)
    model.config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["model_type"] == "spkv"
    assert "stock class would run this model dense" in content["text_config"]["num_hidden_layers"]
    again = AutoConfig.from_pretrained(tmp_path)
    assert config_shape(again) == config_shape(model.config)
    assert again.spkv["layout"]["heads"] == list(chosen.heads)
