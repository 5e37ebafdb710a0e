"""Test models with learned sinks, a logit per query head in the softmax's denominator, on a random gpt-oss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import check_generation, logits, tiny_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import spkv_nas
from spkv_nas import (
    GateConfig,
    Layout,
    UserError,
    apply_layout,
    attach_gates,
    detach,
    set_gate_mode,
)
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.attention import layer_states
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.export.export import export
from spkv_nas.model.learned_sinks import refuse_learned_sinks
from spkv_nas.model.windows import full_attention
from spkv_nas.probing.frozen import Mixture

NATIVE = Layout(("LL", "GG", "LL", "GG"), 8)  # layers 0 and 2 have a sliding window of 8 keys
HYBRID = Layout(("LL", "GL", "LL", "LG"), 8, sinks=2)


@pytest.fixture
def model() -> PreTrainedModel:
    """Return a model whose sinks are large enough that they matter."""
    model = tiny_model("gpt_oss", vocab_size=300)
    model.generation_config.eos_token_id = None
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model


@pytest.fixture
def text() -> Tensor:
    return torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))


def test_attention_is_that_of_transformers(model: PreTrainedModel, text: Tensor) -> None:
    """Such models were refused. Sliding layers keep their window, and the sinks get the gradient."""
    model.set_attn_implementation("eager")
    expected = logits(model, text)
    model(input_ids=text, labels=text).loss.backward()
    gradients = [layer.self_attn.sinks.grad.clone() for layer in model.model.layers]
    model.zero_grad()
    apply_layout(model, NATIVE)
    assert torch.allclose(logits(model, text), expected, atol=1e-5)
    model(input_ids=text, labels=text).loss.backward()
    for layer, gradient in zip(model.model.layers, gradients, strict=True):
        assert gradient.abs().max() > 0
        assert torch.allclose(layer.self_attn.sinks.grad, gradient, rtol=1e-3, atol=1e-7)
    detach(model)
    with full_attention(model):
        assert torch.allclose(logits(model, text), expected, atol=1e-5)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
    assert not torch.allclose(logits(model, text), expected, atol=1e-3)


@pytest.mark.parametrize("family", ["granite_swa", "granitemoe_swa", "flint"])
def test_attention_of_other_families(family: str, text: Tensor) -> None:
    model = tiny_model(family, vocab_size=300)
    torch.manual_seed(1)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    model.set_attn_implementation("eager")
    expected = logits(model, text)
    apply_layout(model, Layout(("GG",) * 4, 8))
    assert torch.allclose(logits(model, text), expected, atol=1e-5)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
    assert not torch.allclose(logits(model, text), expected, atol=1e-3)


def test_open_gates_change_nothing(model: PreTrainedModel, text: Tensor) -> None:
    expected = logits(model, text)
    attach_gates(model, GateConfig(window=6, bias=40.0), seed=0)
    assert [state.gate_window for state in layer_states(model)] == [None, 6, None, 6]
    assert torch.allclose(logits(model, text), expected, atol=1e-5)


def test_densities_and_scores(model: PreTrainedModel, blocks: TokenBlocks) -> None:
    """Sink tokens are for heads of full-attention layers; native sliding layers were trained without them."""
    full, native, hybrid = zero_shot(model, [None, NATIVE, HYBRID], blocks)
    assert full.mean == pytest.approx(native.mean, rel=1e-6)
    assert full.mean != hybrid.mean
    apply_layout(model, HYBRID)
    assert [state.sinks for state in layer_states(model)] == [(0, 0), (0, 2), (0, 0), (2, 0)]
    expected = zero_shot(model, [HYBRID], blocks)[0]
    assert hybrid.mean == pytest.approx(expected.mean, rel=1e-6)
    detach(model)
    attach_gates(model, GateConfig(window=6, bias=0.0), seed=0)
    set_gate_mode(model, "hard")
    table = spkv_nas.probe(model, blocks)
    assert table.grid == (4, 2)
    assert np.isfinite(table.values).all()


def test_head_gates_compute_them(model: PreTrainedModel, blocks: TokenBlocks) -> None:
    """With all gates open, the mixture of the signal is the model, sinks included; sliding layers are not measured."""
    tokens = torch.as_tensor(blocks.tokens[:2])
    expected = logits(model, tokens)
    with full_attention(model) as states:
        for state in states:
            state.observer = Mixture.of_global(state, torch.ones(2), window=6, sinks=0)
        assert torch.allclose(logits(model, tokens), expected, atol=1e-5)
    table = spkv_nas.head_gates(model, blocks, window=6, budget=2, steps=3)
    assert table.grid == (4, 2)
    assert np.isfinite(table.values).all()
    assert set(np.argwhere(table.values == table.values.max())[:, 0]) <= {1, 3}


@pytest.mark.parametrize("kind", ["gates", "layout"])
def test_generation_equals_whole_passes(kind: str, model: PreTrainedModel) -> None:
    """With left padding, decoding and extending; of single and of several tokens."""
    if kind == "gates":
        attach_gates(model, GateConfig(window=6, bias=0.0, sinks=1), seed=0)
        set_gate_mode(model, "hard")
    else:
        apply_layout(model, HYBRID)
    check_generation(model)


def test_export(
    model: PreTrainedModel, text: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The layout and the learned sinks are restored; no native architecture of such models is offered."""
    save(model, tiny_tokenizer, tmp_path / "dense")
    exported = export(HYBRID, tmp_path / "dense", tmp_path / "out")
    assert exported.target == "spkv"
    restored, _ = load(tmp_path / "out")
    apply_layout(model, HYBRID)
    assert torch.allclose(logits(restored, text), logits(model, text), atol=1e-6)
    assert [state.sinks for state in layer_states(restored)] == [
        state.sinks for state in layer_states(model)
    ]


def test_measurements_that_ignore_them_are_refused(model: PreTrainedModel, text: Tensor) -> None:
    """The sinks per token of other models, too: they were ignored."""
    with full_attention(model) as states:
        states[1].observer = lambda q, k, v, scale, sink_logits: refuse_learned_sinks(sink_logits)
        with pytest.raises(UserError, match=r"has learned sinks .* choose another signal"):
            logits(model, text)
        states[1].observer = lambda q, k, v, scale, sink_logits: None
        logits(model, text)
    attention = model.model.layers[1].self_attn
    q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    from spkv_nas.model.attention import _attention_function

    with pytest.raises(UserError, match="sink logits per token"):
        _attention_function(attention, q, k, k, None, sinks=torch.zeros(1, 4, 3, 1))
