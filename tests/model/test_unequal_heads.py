"""Test models whose heads differ in number by layer, whose values differ in size from keys, or with capped scores."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import check_generation, logits, save_with_tokenizer, sharpen_attention, tiny_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.attention import layer_states
from spkv_nas.model.checkpoint import load
from spkv_nas.model.export.export import export
from spkv_nas.model.generation_cache import SPKVCache
from spkv_nas.model.windows import apply_layout, full_attention
from spkv_nas.probing.frozen import Mixture
from spkv_nas.probing.measure import measure_signal
from spkv_nas.proposal.constraints import Constraints, solve
from spkv_nas.proposal.propose import propose
from spkv_nas.proposal.requirements import Requirements

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}  # fmt: skip
_CAPPED: dict[str, Any] = {
    "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "sliding_window": 9,
}  # fmt: skip
_MIXTURE: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
_SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
UNEQUAL: dict[str, dict[str, Any]] = {  # options of models; the experts can be computed in float64
    "gemma4_text": {
        **_SLIDING, "num_key_value_heads": 4, "num_global_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
        "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    },
    "mimo_v2_flash": {
        **_SLIDING, **_MIXTURE, "head_dim": 12, "v_head_dim": 8, "topk_group": 1, "mlp_layer_types": ["dense"] * 4,
    },
    "gemma2": _CAPPED,
    "vaultgemma": _CAPPED,
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "deepseek_v3": {**_LATENT, **_MIXTURE, "topk_group": 1, "experts_implementation": "eager"},
}  # fmt: skip


def unequal_model(family: str) -> PreTrainedModel:
    """Make a model of ``UNEQUAL`` whose attention is far from uniform."""
    model = sharpen_attention(tiny_model(family, vocab_size=300, **UNEQUAL[family]), 4.0)
    model.generation_config.eos_token_id = None
    return model


def masked_logits(model: PreTrainedModel, layout: Layout, native: tuple[int | None, ...], tokens: Tensor) -> Tensor:
    """Compute logits of a dense model under the explicit mask of a layout; ``native`` windows stay as they are."""
    model.set_attn_implementation("eager")
    layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    t, s = torch.arange(tokens.shape[1])[:, None], torch.arange(tokens.shape[1])
    for layer, windows, fixed in zip(layers, layout.head_windows, native, strict=True):
        group = model.config.num_attention_heads // len(windows)
        seen = [
            (t - s < fixed) if fixed else (t - s < (window or len(t))) | (s < layout.sinks)
            for window in windows
            for _ in range(group)
        ]
        mask = torch.where(torch.stack(seen) & (s <= t), 0.0, -torch.inf)[None].double()
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
        )
    return logits(model, tokens)


@pytest.fixture(params=UNEQUAL)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return unequal_model(request.param)


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


def test_training_equals_an_explicit_mask(model: PreTrainedModel, layout: Layout, tokens: Tensor) -> None:
    dense = copy.deepcopy(model).double()
    apply_layout(model.double(), layout)
    masked_logits(dense, layout, tuple(state.native_window for state in layer_states(model)), tokens)
    for trained in (model, dense):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.005)
        for _ in range(3):
            optimizer.zero_grad()
            trained(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
    actual, expected = logits(model, tokens), logits(dense, tokens)
    assert torch.allclose(actual, expected, atol=1e-4 * float(expected.abs().max()))


def test_mixtures_of_a_probe_equal_the_layout(model: PreTrainedModel, layout: Layout, tokens: Tensor) -> None:
    with full_attention(model.double()) as states:
        for state, row in zip(states, layout.heads, strict=True):
            is_global = torch.tensor([float(letter == "G") for letter in row])
            state.observer = Mixture.of_global(state, is_global, layout.window, layout.sinks)
        actual = logits(model, tokens)
    apply_layout(model, layout)
    assert torch.allclose(actual, logits(model, tokens), atol=1e-6 * float(actual.abs().max()))


def test_generation_equals_whole_passes(model: PreTrainedModel, layout: Layout) -> None:
    apply_layout(model, layout)
    check_generation(model)
    prompt = torch.randint(3, 300, (2, 21), generator=torch.Generator().manual_seed(1))
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
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


@pytest.mark.parametrize("signal", ["head-gates", "window-costs", "add-one-head", "attention-mass"])
@pytest.mark.parametrize("family", ["gemma4_text", "mimo_v2_flash"])
def test_scores_survive_files_and_become_layouts(family: str, signal: str, blocks: TokenBlocks, tmp_path: Path) -> None:
    options = {"steps": 2, "budget": 2} if signal == "head-gates" else {}
    table = measure_signal(signal, unequal_model(family), blocks, window=6, sinks=1, **options)
    assert table.heads_per_layer == (4, 2, 4, 2)
    assert (table.num_heads, table.num_candidates, table.values.shape) == (12, 4, (4, 4))
    table.write(tmp_path)
    restored = HeadScores.read(tmp_path)
    assert np.allclose(restored.values, table.values, equal_nan=True)
    for layout in propose(restored, 3).values():
        assert layout.heads_per_layer == table.heads_per_layer
        assert not layout.global_mask[::2].any()  # the layers with a native window
    if signal == "window-costs":
        assert np.allclose(restored.window_costs.values, table.window_costs.values, equal_nan=True)
        assert set(propose(restored, memory="60%", context=200)["window-per-head"].heads[0]) <= set("LMN")


@pytest.mark.parametrize("family", ["gemma4_text", "mimo_v2_flash", "youtu"])
def test_budgets_of_memory_count_the_size_of_each_head(family: str, blocks: TokenBlocks) -> None:
    """A global head of Gemma 4 is twice as large as a local one: the cache holds what the plan says."""
    model = unequal_model(family)
    table = measure_signal("head-gates", model, blocks, window=6, sinks=1, steps=1, budget=2)
    (layout,) = (one for name, one in propose(table, 3).items() if name == "densest")
    cost = Requirements(context=200).cache_cost(table, None)
    assert cost is not None
    apply_layout(model, layout)
    cache = SPKVCache(model, page_size=4)
    with torch.no_grad():
        model(input_ids=torch.full((1, 200), 5), past_key_values=cache)
    held = 0
    for state, layer in zip(layer_states(model), cache.layers, strict=True):
        sizes = [min(window, 200) for window in state.head_windows(gated=False)]
        keys = sum(size + sinks if size < 200 else size for size, sinks in zip(sizes, state.sinks, strict=True))
        held += keys * 2 * layer.paged[0].head_dim * 4
    assert cost.layout_bytes(layout, table.layers) == held
    assert held < cache.num_bytes < 1.25 * held  # tables, unfinished pages, and 4 % spare ones


def test_proposals_with_unequal_rows_are_those_of_brute_force() -> None:
    density = np.array([[0.9, 0.2, np.nan], [0.5, 0.8, 0.6], [0.7, np.nan, np.nan]])
    table = HeadScores.from_array(density, kind="share")
    assert propose(table, 3)["densest"].heads == ("GL", "LGL", "G")
    assert solve(table, 3, Constraints(max_per_layer=1), window=8).heads == ("GL", "LGL", "G")
    assert solve(table, 4, Constraints(granularity="layer"), window=8).heads == ("LL", "GGG", "G")
    assert solve(table, 5, Constraints(uniform=True, min_per_layer=1), window=8).heads == ("GL", "GGG", "G")
    assert solve(table, 2, Constraints(global_layers=(0,)), window=8).heads == ("GG", "LLL", "L")
    assert (table.mean, table.num_heads) == (pytest.approx(3.7 / 6), 6)
