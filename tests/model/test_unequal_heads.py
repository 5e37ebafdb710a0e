"""Test models whose heads differ in number by layer, or whose values differ in size from their keys."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from helpers import check_generation, logits, save_with_tokenizer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from unequal import UNEQUAL, masked_logits, unequal_model

from spkv_nas.artifacts.layout import Layout
from spkv_nas.model.attention import layer_states
from spkv_nas.model.checkpoint import load
from spkv_nas.model.export.export import export
from spkv_nas.model.generation_cache import SPKVCache
from spkv_nas.model.windows import apply_layout, full_attention

pytestmark = pytest.mark.parametrize("family", UNEQUAL)


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    return unequal_model(family)


@pytest.fixture
def layout(model: PreTrainedModel) -> Layout:
    """Return a layout with mixed heads in every layer."""
    with full_attention(model) as states:
        rows = [("GLLG" if layer % 2 else "LG")[: state.num_kv_heads] for layer, state in enumerate(states)]
        return Layout(
            tuple((row * 2)[: state.num_kv_heads] for row, state in zip(rows, states, strict=True)), 5, sinks=2
        )


def test_layouts_equal_an_explicit_mask(model: PreTrainedModel, layout: Layout, tokens: Tensor) -> None:
    dense = copy.deepcopy(model).double()
    apply_layout(model.double(), layout)
    native = tuple(state.native_window for state in layer_states(model))
    actual, expected = logits(model, tokens), masked_logits(dense, layout, native, tokens)
    assert torch.allclose(actual, expected, atol=1e-6 * float(expected.abs().max()))
    all_local = Layout(tuple("L" * len(row) for row in layout.heads), 5)
    apply_layout(model, all_local)
    assert not torch.allclose(logits(model, tokens), expected, rtol=1e-3)


def test_generation_equals_whole_passes(model: PreTrainedModel, layout: Layout) -> None:
    apply_layout(model, layout)
    check_generation(model)
    prompt = torch.randint(3, 300, (2, 21), generator=torch.Generator().manual_seed(1))
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 40, "do_sample": False}
    whole = model.generate(prompt, use_cache=False, **options)
    assert torch.equal(model.generate(prompt, past_key_values=SPKVCache(model), **options), whole)


def test_exports_compute_the_layout(
    model: PreTrainedModel, layout: Layout, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, tokens: Tensor
) -> None:
    save_with_tokenizer(model, tiny_tokenizer, tmp_path / "dense")
    export(layout, tmp_path / "dense", tmp_path / "out")  # compares with the remote code
    apply_layout(model, layout)
    restored, _ = load(tmp_path / "out")
    assert torch.allclose(logits(restored, tokens), logits(model, tokens), atol=1e-5)
