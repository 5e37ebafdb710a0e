"""Export as a function: which layout the folder gets, and a warning where the weights were trained for another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import gated, logits, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.export import export
from spkv_nas.model.windows import apply_layout

MIXED = Layout(("GL", "LL", "LG", "GG"), 6)
LAYERWISE = Layout(("GG", "LL", "LL", "GG"), 6)


def write(layout: Layout | None, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A dense checkpoint, or a hybrid with ``layout``."""
    model = tiny_model(vocab_size=300)
    if layout is not None:
        apply_layout(model, layout)
    save(model, tokenizer, folder)
    return folder


@pytest.mark.parametrize("layout", [MIXED, LAYERWISE], ids=["mixed", "layerwise"])
def test_a_hybrid_is_exported_as_what_it_is(
    layout: Layout, tokens: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """It used to need the layout's file again, which the checkpoint holds."""
    hybrid = write(layout, tmp_path / "hybrid", tiny_tokenizer)
    said = export(None, hybrid, tmp_path / "out")
    expected = logits(load(hybrid)[0], tokens)
    if layout is LAYERWISE:
        assert "a stock qwen2 checkpoint" in said
        assert torch.allclose(
            logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), tokens), expected, atol=1e-5
        )
    else:
        assert "loads with spkv_nas.load" in said
        assert torch.equal(logits(load(tmp_path / "out")[0], tokens), expected)


def test_weights_that_were_trained_for_another_layout(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """A hybrid used to take any layout without a word."""
    hybrid = write(MIXED, tmp_path / "hybrid", tiny_tokenizer)
    with pytest.warns(UserWarning, match=f"trained for another layout \\(hash {MIXED.hash}\\) than the one given"):
        export(LAYERWISE, hybrid, tmp_path / "other")
    export(Layout(MIXED.heads, MIXED.window, "renamed"), hybrid, tmp_path / "same")
    with pytest.warns(UserWarning, match="another layout"):
        export(Layout(MIXED.heads, 5), hybrid, tmp_path / "window")
    assert load(tmp_path / "window")[0].config.spkv["layout"]["window"] == 5


@pytest.mark.parametrize("kind", ["dense", "gates"])
def test_a_checkpoint_without_a_layout(kind: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    save(tiny_model(vocab_size=300) if kind == "dense" else gated(), tiny_tokenizer, tmp_path / kind)
    with pytest.raises(UserError, match="has no layout of its own to export\ngive a layout"):
        export(None, tmp_path / kind, tmp_path / "out")
    assert not (tmp_path / "out").exists()
