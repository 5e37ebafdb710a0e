"""Test exports as GraniteSWA: plain transformers computes what the hybrid does, with and without learned sinks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import logits, save_with_tokenizer, sharpen_attention, tiny_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas import Layout, UserError, apply_layout
from spkv_nas.model.export import native, verify_export
from spkv_nas.model.export.export import export
from spkv_nas.model.windows import add_learned_sinks

LAYERWISE = Layout(("GG", "LL", "LL", "GG"), 6)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-bias": {"attention_bias": True, "mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-yarn": {"rope_parameters": YARN, "head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "ministral": {"head_dim": 8, "sliding_window": 4, "layer_types": ["full_attention"] * 4},
    "smollm3": {"pad_token_id": 0, "no_rope_layers": [1, 1, 1, 0]},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "rms_norm_eps": 1e-4,
    },
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
}


def hybrid_model(case: str, *, learned: bool) -> PreTrainedModel:
    """Make a hybrid of the case's family by whole layers."""
    model = sharpen_attention(tiny_model(case.partition("-")[0], vocab_size=300, **CASES[case]), 6)
    apply_layout(model, LAYERWISE)
    if learned:
        add_learned_sinks(model, [torch.linspace(0.3, 3.0, 4) + layer for layer in range(4)])
    return model


def write(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    save_with_tokenizer(model, tokenizer, folder)
    return folder


@pytest.mark.slow
def test_plain_transformers_computes_the_hybrid(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """One fresh process answers for all families; whole passes and decoding."""
    hybrids: dict[Path, verify_export.ReferenceLogits] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_export, "check", lambda *_: 0.0)
        for case in CASES:
            for learned in (False, True):
                model = hybrid_model(case, learned=learned)
                folder = write(model, tmp_path / f"{case}-{learned}", tiny_tokenizer)
                out = tmp_path / f"{case}-{learned}-out"
                assert export(None, folder, out, to="granite_swa").target == "granite_swa"
                hybrids[out] = verify_export.expected(model, LAYERWISE.window)
    answers = verify_export.plain_answers(hybrids)
    for (folder, hybrid), answer in zip(hybrids.items(), answers, strict=True):
        assert verify_export.compare(answer, hybrid) <= verify_export.TOLERANCE, folder
    # Learned sinks matter, so that the comparison can fail
    for case in CASES:
        with_sinks, without = (
            hybrids[tmp_path / f"{case}-{learned}-out"].logits for learned in (True, False)
        )
        assert (
            float((with_sinks - without).abs().max() / without.abs().max())
            > 100 * verify_export.TOLERANCE
        )


def test_learned_sinks_are_exported_by_default(
    tokens: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Heads without one get -10000, never the 0 of a new model."""
    model = hybrid_model("llama", learned=True)
    exported = export(None, write(model, tmp_path / "hybrid", tiny_tokenizer), tmp_path / "out")
    assert exported.target == "granite_swa"
    assert list(exported.rejected) == ["native"]
    assert "a granite_swa checkpoint, which plain transformers loads" in exported.form
    assert "its logits are the hybrid's to" in exported.form
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(plain).__name__ == "GraniteSWAForCausalLM"
    assert torch.allclose(logits(plain, tokens), logits(model, tokens), atol=1e-5)
    sinks = [layer.self_attn.sinks.tolist() for layer in plain.model.layers]
    assert sinks[0] == sinks[3] == [-1e4] * 4
    assert sinks[1] == pytest.approx([1.3, 2.2, 3.1, 4.0])
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "spkv" not in config
    assert config["layer_types"] == [
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ]
    assert (config["sliding_window"], config["use_cache"]) == (6, True)
    assert config["layer_rope_theta"] == [config["rope_parameters"]["rope_theta"]] * 4
    weights = load_file(tmp_path / "out/model.safetensors")
    assert not any("learned" in name for name in weights)
    for name, tensor in load_file(tmp_path / "hybrid/model.safetensors").items():
        assert "learned" in name or torch.equal(weights[name], tensor)


def test_sinks_of_bfloat16_weights_are_rounded(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The file has one dtype, in which transformers loads it; the hybrid is compared with the rounded sinks."""
    model = hybrid_model("llama", learned=True)
    added = model.model.layers[1].self_attn.learned_sinks
    model.to(torch.bfloat16)
    added.to(torch.float32)
    model.model.layers[2].self_attn.learned_sinks.to(torch.float32)
    with torch.no_grad():
        added.logits.fill_(1.2345)
    exported = export(None, write(model, tmp_path / "hybrid", tiny_tokenizer), tmp_path / "out")
    assert exported.target == "granite_swa", str(exported)
    sinks = load_file(tmp_path / "out/model.safetensors")["model.layers.1.self_attn.sinks"]
    assert sinks.dtype == torch.bfloat16
    assert sinks.float() == pytest.approx([1.234375] * 4)


@pytest.mark.parametrize(
    ("family", "layout", "message"),
    [
        ("llama", Layout(("GL", "LL", "LL", "GG"), 6), "layer 0 mixes global and local heads"),
        ("llama", Layout(LAYERWISE.heads, 6, sinks=2), "see 2 sink tokens"),
        ("qwen3", LAYERWISE, "weights of model type 'qwen3' do not fit a granite_swa"),
        ("phi3", LAYERWISE, "weights of model type 'phi3' do not fit a granite_swa"),
    ],
)
def test_what_it_cannot_express(
    family: str,
    layout: Layout,
    message: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    options = {"pad_token_id": 0} if family == "phi3" else {}
    dense = write(tiny_model(family, vocab_size=300, **options), tmp_path / "dense", tiny_tokenizer)
    with pytest.raises(UserError, match=f"not exported as granite_swa: .*{message}"):
        export(layout, dense, tmp_path / "out", to="granite_swa")
    assert not (tmp_path / "out").exists()


def test_a_transformers_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.auto import configuration_auto

    config = tiny_model().config
    monkeypatch.setattr(configuration_auto, "CONFIG_MAPPING", {})
    reason = native.GraniteSwaTarget().can_express(config, LAYERWISE)
    assert reason == "the installed transformers has no granite_swa; version 5.23 has it"
