"""Test exports of twelve model families: plain transformers reproduces the hybrid in a fresh process.

All exports are written first. Then one fresh process answers for all of them, and another one, which imports spkv_nas,
for those with a model type of their own, whose code the first one runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FAMILIES, save_with_tokenizer, sharpen_attention, tiny_model
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.model.export import verify_export
from spkv_nas.model.export.export import export
from spkv_nas.model.export.target import TargetError
from spkv_nas.model.windows import apply_layout

pytestmark = pytest.mark.slow

WINDOW = 4  # the native window, where a model has one: layer_types has a single one for all layers
FULL, SLIDING = "full_attention", "sliding_attention"
BOTH = {"sliding_window": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    **{family: {} for family in FAMILIES},
    "cohere2": BOTH,
    "exaone4": BOTH,
    "olmo3": BOTH,
    "ministral": {**BOTH, "head_dim": 8},
    "gpt_oss": {"sliding_window": 4},
    "granite_swa": {**BOTH, "layer_rope_theta": [1e4, 0, 5e5, 1e4], "attention_multiplier": 0.3},
    "llama-bias": {"attention_bias": True},
    "olmo3-yarn": {
        **BOTH,
        "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
    },
    "mistral-window": {"sliding_window": 6},
    "llama-tied": {"tie_word_embeddings": True},
}
KINDS = {
    **{
        one: one
        for one in ("qwen2", "qwen3", "smollm3", "ministral", "olmo3", "gpt_oss", "granite_swa")
    },
    **dict.fromkeys(("llama", "llama-tied", "mistral"), "ministral"),
    "olmo2": "olmo3",
    "granite": "granite_swa",
}
KINDS_IF_NATIVE = {
    "mistral-window": "ministral",  # any other layout has two windows
    **{
        one: one.removesuffix("-yarn")
        for one in ("gemma3_text", "cohere2", "exaone4", "olmo3-yarn")
    },
}
CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
}
SPLITS, TYPES = ("layers", "heads"), ("native", "other")


def layout(model: PreTrainedModel, split: str, types: str) -> Layout:
    """Return a layout with the model's layers or two of them changed; by whole layers, or with mixed heads in one."""
    kinds = getattr(model.config, "layer_types", None) or [FULL] * 4
    rows = ["GG" if kind == FULL else "LL" for kind in kinds]
    if types == "other":
        rows[:2] = ["LL" if row == "GG" else "GG" for row in rows[:2]]
    if split == "heads":
        rows[-1] = "GL"  # a layer of full attention in every case
    return Layout(tuple(rows), WINDOW)


@dataclass
class Exported:
    """One export: its folder, its message, what the hybrid computes, and how far the dense model is from it."""

    folder: Path
    message: str
    hybrid: verify_export.ReferenceLogits
    dense_difference: float


Key = tuple[str, str, str]


@pytest.fixture(scope="module")
def exports(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> dict[Key, Exported]:
    """All exports; each is checked later."""
    folder, result = tmp_path_factory.mktemp("exports"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_export, "check", lambda *_: 0.0)
        for case in CASES:
            dense = folder / case / "dense"
            model = sharpen_attention(
                tiny_model(case.partition("-")[0], vocab_size=300, **CASES[case])
            )
            save_with_tokenizer(model, tiny_tokenizer, dense)
            for split in SPLITS:
                for types in TYPES:
                    chosen = layout(model, split, types)
                    out = folder / case / f"{split}-{types}"
                    message = str(export(chosen, dense, out))
                    apply_layout(model, Layout(("GG",) * 4, WINDOW))
                    full = verify_export.expected(model, WINDOW).logits
                    apply_layout(model, chosen)
                    hybrid = verify_export.expected(model, WINDOW)
                    difference = float(
                        (full - hybrid.logits).abs().max() / hybrid.logits.abs().max()
                    )
                    result[case, split, types] = Exported(out, message, hybrid, difference)
    return result


@pytest.fixture(scope="module")
def answers(exports: dict[Key, Exported]) -> dict[Key, torch.Tensor | str]:
    """Results of plain transformers for each export, in one fresh process."""
    hybrids = {one.folder: one.hybrid for one in exports.values()}
    return dict(zip(exports, verify_export.plain_answers(hybrids), strict=True))


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", CASES)
def test_plain_transformers_runs_the_hybrid(
    case: str,
    split: str,
    types: str,
    exports: dict[Key, Exported],
    answers: dict[Key, torch.Tensor | str],
) -> None:
    exported, answer = exports[case, split, types], answers[case, split, types]
    if case == "llama-bias" and split == "layers":  # here it is the check that refuses
        with pytest.raises(
            TargetError, match=r"MinistralForCausalLM has unexpected keys, such as .*bias"
        ):
            verify_export.compare(answer, exported.hybrid)
        return
    kind = KINDS.get(case) or (KINDS_IF_NATIVE.get(case) if types == "native" else None)
    if split == "heads" or kind is None:
        assert "not exported as native" in exported.message
        assert json.loads((exported.folder / "config.json").read_text())["model_type"] == "spkv"
    else:
        assert f"a {'' if case == 'granite' else 'native '}{kind} checkpoint" in exported.message
    assert verify_export.compare(answer, exported.hybrid) <= verify_export.TOLERANCE
    if split == "layers" and types == "native":
        return  # the dense model itself
    # So that the comparison can fail
    assert exported.dense_difference > 100 * verify_export.TOLERANCE


def test_custom_types_load_after_import_spkv_nas(
    exports: dict[Key, Exported], tmp_path: Path
) -> None:
    """Transformers' Auto class loads them without code from the folder, with the same logits."""
    custom = [one for one in exports.values() if "with trust_remote_code=True" in one.message]
    assert len(custom) > 2 * len(CASES)
    (tmp_path / "own.json").write_text(
        json.dumps([[str(one.folder), one.hybrid.tokens] for one in custom])
    )
    program = """
import json, sys, spkv_nas
assert not {"torch", "transformers"} & set(sys.modules)
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
logits = {}
for number, (folder, tokens) in enumerate(json.load(open("own.json"))):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    with torch.no_grad():
        logits[str(number)] = model(torch.tensor([tokens])).logits[0].contiguous()
save_file(logits, "own.safetensors")
"""
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    result = load_file(tmp_path / "own.safetensors")
    for number, one in enumerate(custom):
        logits = result[str(number)][-len(one.hybrid.logits) :]
        assert torch.allclose(
            logits, one.hybrid.logits, atol=1e-5 * float(one.hybrid.logits.abs().max())
        ), one.folder


def test_native_exports_have_the_weights_of_the_dense_model(exports: dict[Key, Exported]) -> None:
    """All tensors of the checkpoint and no others, and no settings of hooks in the config."""
    for (case, split, types), one in exports.items():
        if "a native" not in one.message or case == "llama-bias":
            continue
        dense = load_file(one.folder.parent / "dense" / "model.safetensors")
        weights = load_file(one.folder / "model.safetensors")
        assert dense.keys() == weights.keys(), (case, split, types)
        assert all(torch.equal(dense[name], weights[name]) for name in dense)
        config = json.loads((one.folder / "config.json").read_text())
        assert "spkv" not in config
        assert config["use_cache"] is True
        assert config["architectures"] == [CLASSES[config["model_type"]]]
        assert (one.folder / "tokenizer.json").is_file()
