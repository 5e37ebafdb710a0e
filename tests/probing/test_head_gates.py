"""Test head gates: layouts at 0 and 1, the loss's gradient in between, and the budget met."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

import spkv_nas
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.model.attention import attention_layers
from spkv_nas.model.loss import mean_nll
from spkv_nas.model.windows import apply_layout, full_attention
from spkv_nas.probing import frozen
from spkv_nas.probing.frozen import Mixture
from spkv_nas.probing.head_gates import head_gates, project

WINDOW, LENGTH = 6, 40
SHARED_KEYS: dict[str, Any] = {  # layers 4 and 5 read the keys of 2 and 3
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
    "head_dim": 8, "global_head_dim": 8, "sliding_window": 10, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture
def blocks() -> TokenBlocks:
    """Token blocks: 8 of 40 tokens, 20 random ones twice."""
    tokens = np.random.default_rng(0).integers(3, 290, size=(8, 20)).astype(np.int32)
    tokens = np.concatenate([tokens, tokens], axis=1)
    owner = np.repeat(np.arange(8, dtype=np.int32), LENGTH).reshape(8, LENGTH)
    return TokenBlocks(tokens, owner, tuple(DocumentInfo(str(i), "all", str(i)) for i in range(8)))


def strong_attention_model(dead: bool = False) -> PreTrainedModel:
    """Make a model whose heads matter; if ``dead``, KV head 1 of every layer is unused."""
    model = tiny_model(vocab_size=300)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 8.0
            if dead:
                layer.self_attn.o_proj.weight[:, 16:] = 0.0
    return model


@contextmanager
def gated_heads(model: PreTrainedModel, gates: Tensor) -> Iterator[None]:
    with full_attention(model) as states:
        for state, gate in zip(states, gates, strict=True):
            state.observer = Mixture.of_global(state, gate, WINDOW, 0)
        yield


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text"])
def test_gates_of_0_and_1_equal_the_layout(family: str, blocks: TokenBlocks) -> None:
    """Also of a layout that is proposed from learned gates, and where layers share keys."""
    model = tiny_model(
        family, vocab_size=300, **(SHARED_KEYS if family == "gemma4_text" else {})
    ).double()
    tokens = torch.from_numpy(blocks.tokens.astype(np.int64))
    full = float(mean_nll(model, tokens).detach())
    learned = spkv_nas.propose(head_gates(model, blocks, WINDOW, sinks=0, budget=2, steps=2))[
        "densest"
    ]
    for rows in (("LL",) * 4, ("GG", "LG", "GL", "LG"), ("GG",) * 4, learned.heads):
        gates = torch.tensor([[float(letter == "G") for letter in row] for row in rows])
        with gated_heads(model, gates):
            mixed = float(mean_nll(model, tokens).detach())
        apply_layout(model, Layout(rows, WINDOW))
        assert mixed == pytest.approx(float(mean_nll(model, tokens).detach()), abs=1e-7)
        assert mixed != full or rows == ("GG",) * 4


def test_gates_have_the_gradient_of_the_loss(blocks: TokenBlocks) -> None:
    """Central differences of the mean NLL."""
    model = strong_attention_model().double()
    tokens = torch.from_numpy(blocks.tokens[:2].astype(np.int64))
    gates = torch.linspace(0.2, 0.9, 8).view(4, 2).double().requires_grad_()
    with gated_heads(model, gates):
        (gradient,) = torch.autograd.grad(mean_nll(model, tokens), gates)
    for layer, head in ((0, 0), (1, 1), (3, 0)):
        change = torch.zeros(4, 2).double()
        change[layer, head] = 1e-2
        sides = []
        for moved in (gates.detach() + change, gates.detach() - change):
            with gated_heads(model, moved):
                sides.append(float(mean_nll(model, tokens).detach()))
        assert float(gradient[layer, head]) == pytest.approx((sides[0] - sides[1]) / 2e-2, rel=2e-2)


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_projection(budget: int) -> None:
    """No random point that meets the budget is nearer, and one price separates what is not clamped."""
    generator = torch.Generator().manual_seed(budget)
    for _ in range(20):
        values = torch.randn(4, 2, generator=generator).double()
        near = project(values, budget)
        assert float(near.sum()) == pytest.approx(budget, abs=1e-9)
        assert 0.0 <= float(near.min()) <= float(near.max()) <= 1.0
        price = (values - near)[(near > 1e-9) & (near < 1 - 1e-9)]
        assert price.numel() == 0 or float(price.max() - price.min()) < 1e-9
        other = project(torch.randn(4, 2, generator=generator).double(), budget)
        assert float((values - near).norm()) <= float((values - other).norm()) + 1e-9


@pytest.mark.slow
def test_heads_with_long_range_get_the_budget() -> None:
    """Heads of layer 6 of the embedded model gain most (reports/stdlib-21x3); the model is unchanged."""
    model, tokenizer = spkv_nas.load("embedded:dense")
    blocks = spkv_nas.build_blocks(
        [Path(json.decoder.__file__).read_text(), Path(__file__).read_text()], tokenizer
    )
    seen: list[tuple[int, int]] = []
    table = head_gates(
        model,
        blocks,
        32,
        budget=6,
        steps=6,
        step_tokens=1024,
        progress=lambda *step: seen.append(step),
    )
    assert seen == [(step, 6) for step in range(1, 7)]
    assert table.density.sum() == pytest.approx(6.0)
    assert set(np.argsort(table.density, axis=None)[-3:] // 3) == {6}
    facts = {key: table.record.entries()[key] for key in ("signal", "budget", "steps", "tokens")}
    assert facts == {"signal": "head-gates", "budget": 6, "steps": 6, "tokens": blocks.tokens.size}
    assert table.record.entries()["passes"] == pytest.approx(
        3 * 6 * 1024 / blocks.tokens.size, abs=0.01
    )
    assert not attention_layers(model)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_dead_heads_are_equal_and_seeds_repeat(blocks: TokenBlocks) -> None:
    """Heads that nothing reads have no gradient: only the common price moves their gates."""
    model = strong_attention_model(dead=True)
    options: dict[str, Any] = {"budget": 3, "steps": 4, "step_tokens": 4 * LENGTH}
    table = head_gates(model, blocks, WINDOW, **options)
    assert table.measure.unit == spkv_nas.SIGNALS["head-gates"].unit
    assert np.ptp(table.density[:, 1]) < 1e-9 < np.ptp(table.density[:, 0])
    assert np.array_equal(head_gates(model, blocks, WINDOW, **options).density, table.density)
    assert not np.array_equal(
        head_gates(model, blocks, WINDOW, seed=1, **options).density, table.density
    )


def test_little_memory_changes_nothing(
    blocks: TokenBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single blocks with activation checkpointing give the same gates."""
    model = strong_attention_model(dead=True)
    options: dict[str, Any] = {"budget": 3, "steps": 5, "step_tokens": 4 * LENGTH}
    whole = head_gates(model, blocks, WINDOW, **options)
    monkeypatch.setattr(frozen.weights, "memory_for_passes", lambda _: 1)
    parted = head_gates(model, blocks, WINDOW, **options)
    assert parted.density == pytest.approx(whole.density, abs=1e-4)
    assert len(np.unique(whole.density.round(3))) > 2


def test_invalid_inputs(blocks: TokenBlocks) -> None:
    model = tiny_model(vocab_size=300)
    with pytest.raises(UserError, match="budget 9 means 9 global KV heads, but the model has 8"):
        head_gates(model, blocks, WINDOW, budget=9, steps=1)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="the loss is nan at step 1"):
        head_gates(model, blocks, WINDOW, steps=1)
