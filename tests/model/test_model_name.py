"""Test that names by which libraries load a model again lead to this model, or nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from helpers import save_with_tokenizer, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from spkv_nas import GateConfig, Layout, apply_layout, attach_gates, detach, layout_applied

LAYOUT, OTHER = Layout(("GL", "LL", "LG", "GG"), 5, sinks=1), Layout(("LL", "GG", "LL", "LG"), 7)


@pytest.fixture
def dense(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path / "dense"
    save_with_tokenizer(tiny_model(), tiny_tokenizer, folder)
    return folder


@pytest.fixture
def hybrid(dense: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    model = AutoModelForCausalLM.from_pretrained(dense)
    apply_layout(model, LAYOUT)
    save_with_tokenizer(model, tiny_tokenizer, tmp_path / "hybrid")
    return tmp_path / "hybrid"


def test_a_changed_model_has_the_name_of_no_folder(dense: Path) -> None:
    """TRL makes a reference policy from this name, and PEFT writes it to adapters."""
    model = AutoModelForCausalLM.from_pretrained(dense)
    for change in (
        lambda: apply_layout(model, LAYOUT),
        lambda: attach_gates(model, GateConfig(window=5)),
    ):
        change()
        assert model.name_or_path == model.config._name_or_path
        assert model.name_or_path.startswith(f"{dense} changed by spkv_nas in memory: save it")
        with pytest.raises(OSError, match="changed by spkv_nas in memory"):
            AutoModelForCausalLM.from_pretrained(model.config._name_or_path)
        detach(model)
        assert model.name_or_path == model.config._name_or_path == str(dense)


def test_a_hybrid_has_the_name_of_its_folder(hybrid: Path) -> None:
    """While it has the layout of that folder, and not while it has another one, or none."""
    model = AutoModelForCausalLM.from_pretrained(hybrid)
    assert model.name_or_path == model.config._name_or_path == str(hybrid)
    with layout_applied(model, OTHER):
        assert model.config._name_or_path.startswith(f"{hybrid} changed")
    assert model.config._name_or_path == str(hybrid)
    detach(model)
    assert model.config._name_or_path.startswith(f"{hybrid} changed")
    apply_layout(model, LAYOUT)
    assert model.config._name_or_path == str(hybrid)


def test_architectures_are_those_that_read_the_folder(hybrid: Path, tmp_path: Path) -> None:
    """TRL loads a folder by the class that its config names, or an Auto class where transformers has none."""
    config = AutoConfig.from_pretrained(hybrid)
    assert config.architectures == ["SPKVLlamaForCausalLM"]
    assert not hasattr(transformers, "SPKVLlamaForCausalLM")
    assert not config.auto_map
    # Written again, and without the layout
    model = AutoModelForCausalLM.from_pretrained(hybrid)
    model.save_pretrained(tmp_path / "again")
    content = json.loads((tmp_path / "again" / "config.json").read_text())
    assert content["architectures"] == ["SPKVLlamaForCausalLM"]
    assert "auto_map" not in content
    detach(model)
    assert model.config.architectures == ["LlamaForCausalLM"]


def test_config_classes_read_the_folder_themselves(hybrid: Path) -> None:
    """PEFT reads the config of an adapter's base model by the class of the config in memory."""
    config = AutoConfig.from_pretrained(hybrid)
    again = type(config).from_pretrained(hybrid)
    assert again.spkv == config.spkv
    assert again.architectures == config.architectures
    assert again.num_hidden_layers == 4
