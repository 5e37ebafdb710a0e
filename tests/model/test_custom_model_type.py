"""Test that no loader silently runs a saved model with gates or a layout as a dense model."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import equal_up_to_rounding, gated, logits, tiny_model, train_branch
from marks import slow_after
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.model.attach import detach
from spkv_nas.model.checkpoint import load
from spkv_nas.model.windows import apply_layout
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant

LAYOUT = Layout(("GL", "LL", "LG", "GG"), window=5)
PLAIN = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
for load in (AutoConfig, AutoModelForCausalLM, LlamaForCausalLM):
    for folder in sys.argv[1:]:
        try:
            load.from_pretrained(folder)
        except Exception as error:
            print("refused", load.__name__, " ".join(str(error).split())[:120])
        else:
            print("loaded", load.__name__)
assert "spkv_nas" not in sys.modules
"""


def hybrid() -> PreTrainedModel:
    model = tiny_model(vocab_size=300)
    apply_layout(model, LAYOUT)
    return model


def model_type(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["model_type"])


def refused_by_plain_transformers(*folders: Path) -> None:
    """Check, in a fresh process, that Auto classes refuse the type, and the family's classes the number of layers."""
    completed = subprocess.run(
        [sys.executable, "-c", PLAIN, *map(str, folders)], capture_output=True, text=True
    )
    lines = completed.stdout.splitlines()
    assert completed.returncode == 0, completed.stderr
    assert len(lines) == 3 * len(folders)
    for line in lines:
        assert line.startswith("refused"), line
        assert ("num_hidden_layers" if "LlamaFor" in line else "model type `spkv`") in line


@pytest.mark.slow
@pytest.mark.parametrize("make", slow_after(1, [hybrid, gated]))
def test_save_pretrained_keeps_the_model_type(make: object, tokens: Tensor, tmp_path: Path) -> None:
    """The family's type would load a dense model without a warning."""
    model = make()  # type: ignore[operator]
    model.save_pretrained(tmp_path / "saved")
    assert model_type(tmp_path / "saved") == "spkv"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    expected = logits(model, tokens)
    assert equal_up_to_rounding(logits(again, tokens), expected)
    dense = copy.deepcopy(model)
    detach(dense)
    assert not torch.allclose(logits(dense, tokens), expected, atol=1e-3)
    refused_by_plain_transformers(tmp_path / "saved")


@pytest.mark.parametrize("make", [hybrid, gated])
def test_without_gates_and_layout_it_is_saved_unchanged(
    make: object, tokens: Tensor, tmp_path: Path
) -> None:
    model = make()  # type: ignore[operator]
    detach(model)
    model.save_pretrained(tmp_path)
    assert model_type(tmp_path) == "llama"
    assert equal_up_to_rounding(
        logits(LlamaForCausalLM.from_pretrained(tmp_path), tokens), logits(model, tokens)
    )
    assert type(model.config) is type(tiny_model().config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    slow_after(1, [Variant.hybrid(Layout(("GL", "LL"), 8)), Variant.sp_kv()]),
    ids=["hybrid", "gates"],
)
def test_what_training_leaves_is_refused_or_what_it_is(
    variant: Variant, recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path, tokens: Tensor
) -> None:
    branch = train_branch(recipe, corpus, dense, tmp_path / "branch", variant, device="cpu")
    assert model_type(branch.checkpoint) == "spkv"
    expected = logits(load(branch.checkpoint)[0], tokens)
    assert equal_up_to_rounding(
        logits(AutoModelForCausalLM.from_pretrained(branch.checkpoint), tokens), expected
    )
    refused_by_plain_transformers(branch.checkpoint)


def test_a_dense_model_is_unchanged(tokens: Tensor, tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again.config) is type(model.config)
    assert equal_up_to_rounding(logits(again, tokens), logits(model, tokens))


def test_copies_keep_the_type(tokens: Tensor, tmp_path: Path) -> None:
    model = hybrid()
    for number, copied in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        assert copied.config.to_dict() == model.config.to_dict()
        copied.save_pretrained(tmp_path / str(number))
        assert model_type(tmp_path / str(number)) == "spkv"
        assert equal_up_to_rounding(logits(copied, tokens), logits(model, tokens))


def test_a_config_in_memory_builds_the_same_kind_of_model(tokens: Tensor) -> None:
    model = hybrid()
    built = AutoModelForCausalLM.from_config(model.config)
    built.load_state_dict(model.state_dict())
    assert equal_up_to_rounding(logits(built.eval(), tokens), logits(model, tokens))


def test_model_classes_may_be_imported_first() -> None:
    """The model type is registered while transformers imports its models: nothing of these is imported then."""
    program = "import spkv_nas; from transformers import PreTrainedModel"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
