"""Test models whose heads differ in number by layer, whose values differ in size from keys, or with capped scores."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    check_generation,
    equal_up_to_rounding,
    logits,
    save_with_tokenizer,
    sharpen_attention,
    tiny_model,
)
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.cost.formulas import cost
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.attention import layer_states
from spkv_nas.model.checkpoint import load
from spkv_nas.model.export.export import export
from spkv_nas.model.generation_cache import SPKVCache
from spkv_nas.model.learned_sinks import learned_sinks
from spkv_nas.model.model_shape import config_size
from spkv_nas.model.windows import add_learned_sinks, apply_layout, full_attention
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
_MIXTURE: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "experts_implementation": "eager",
}  # fmt: skip
_SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
}
UNEQUAL: dict[str, dict[str, Any]] = {  # options of models; the experts can be computed in float64
    "gemma4_text": {
        **_SLIDING, "num_key_value_heads": 4, "num_global_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
        "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    },
    "mimo_v2_flash": {
        **_SLIDING, **_MIXTURE, "head_dim": 12, "v_head_dim": 8, "mlp_layer_types": ["dense"] * 4,
    },
    "gemma2": _CAPPED,
    "deepseek_v3": {**_LATENT, **_MIXTURE},
}  # fmt: skip
SLOW: dict[str, dict[str, Any]] = {  # with nothing in their attention that the quick ones have not
    "vaultgemma": _CAPPED,
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "deepseek_v2": {**_LATENT, **_MIXTURE},
    "glm4_moe_lite": {**_LATENT, **_MIXTURE},
    "longcat_flash": {  # two layers of attention in each decoder layer
        **_LATENT, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4,
        "zero_expert_num": 2, "moe_topk": 2, "head_dim": 4, "experts_implementation": "eager",
    },
}  # fmt: skip


def unequal_model(family: str) -> PreTrainedModel:
    """Make a model of ``UNEQUAL`` or ``SLOW`` whose attention is far from uniform."""
    model = sharpen_attention(
        tiny_model(family, vocab_size=300, **{**UNEQUAL, **SLOW}[family]), 4.0
    )
    model.generation_config.eos_token_id = None
    return model


def masked_logits(
    model: PreTrainedModel, layout: Layout, native: tuple[int | None, ...], tokens: Tensor
) -> Tensor:
    """Compute logits of a dense model under the explicit mask of a layout; ``native`` windows stay as they are."""
    model.set_attn_implementation("eager")
    layers = [module for module in model.modules() if hasattr(module, "o_proj")]
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
            lambda _, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}),
            with_kwargs=True,
        )
    return logits(model, tokens)


@pytest.fixture(
    params=[*UNEQUAL, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]
)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return unequal_model(request.param)


@pytest.fixture
def layout(model: PreTrainedModel) -> Layout:
    """Return a layout with mixed heads in every layer."""
    with full_attention(model) as states:
        rows = [
            ("GLLG" if layer % 2 else "LG")[: state.num_kv_heads]
            for layer, state in enumerate(states)
        ]
        return Layout(
            tuple((row * 2)[: state.num_kv_heads] for row, state in zip(rows, states, strict=True)),
            5,
            sinks=2,
        )


def test_layouts_equal_an_explicit_mask(
    model: PreTrainedModel, layout: Layout, tokens: Tensor
) -> None:
    dense = copy.deepcopy(model).double()
    apply_layout(model.double(), layout)
    native = tuple(state.native_window for state in layer_states(model))
    actual, expected = logits(model, tokens), masked_logits(dense, layout, native, tokens)
    assert torch.allclose(actual, expected, atol=1e-6 * float(expected.abs().max()))
    all_local = Layout(tuple("L" * len(row) for row in layout.heads), 5)
    apply_layout(model, all_local)
    assert not torch.allclose(logits(model, tokens), expected, rtol=1e-3)


def test_training_equals_an_explicit_mask(
    model: PreTrainedModel, layout: Layout, tokens: Tensor
) -> None:
    dense = copy.deepcopy(model).double()
    apply_layout(model.double(), layout)
    masked_logits(
        dense, layout, tuple(state.native_window for state in layer_states(model)), tokens
    )
    for trained in (model, dense):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.005)
        for _ in range(3):
            optimizer.zero_grad()
            trained(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
    actual, expected = logits(model, tokens), logits(dense, tokens)
    assert torch.allclose(actual, expected, atol=1e-4 * float(expected.abs().max()))


def test_mixtures_of_a_probe_equal_the_layout(
    model: PreTrainedModel, layout: Layout, tokens: Tensor
) -> None:
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
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 14, "do_sample": False}
    whole = model.generate(prompt, use_cache=False, **options)
    assert torch.equal(model.generate(prompt, past_key_values=SPKVCache(model), **options), whole)


def test_exports_compute_the_layout(
    model: PreTrainedModel,
    layout: Layout,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tokens: Tensor,
) -> None:
    save_with_tokenizer(model, tiny_tokenizer, tmp_path / "dense")
    export(layout, tmp_path / "dense", tmp_path / "out")  # compares with the remote code
    apply_layout(model, layout)
    restored, _ = load(tmp_path / "out")
    assert torch.allclose(logits(restored, tokens), logits(model, tokens), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "signal"),
    [
        *product(
            ["gemma4_text", "mimo_v2_flash"],
            ["head-gates", "window-costs", "add-one-head", "attention-mass"],
        ),
        *product(["deepseek_v3"], ["head-gates", "window-costs", "attention-mass", "duo"]),
    ],
)
def test_scores_survive_files_and_become_layouts(
    family: str, signal: str, blocks: TokenBlocks, tmp_path: Path
) -> None:
    options = {"head-gates": {"steps": 2, "budget": 2}, "duo": {"steps": 2}}
    table = measure_signal(
        signal, unequal_model(family), blocks, window=6, sinks=1, **options.get(signal, {})
    )
    if family == "deepseek_v3":
        assert (table.heads_per_layer, table.record.head_dim) == ((1, 1, 1, 1), 8)
        assert {len(row) for layout in propose(table, 2).values() for row in layout.heads} == {1}
        return
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
        assert set(propose(restored, memory="60%", context=200)["window-per-head"].heads[0]) <= set(
            "LMN"
        )


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
        keys = sum(
            size + sinks if size < 200 else size
            for size, sinks in zip(sizes, state.sinks, strict=True)
        )
        held += keys * 2 * layer.paged[0].head_dim * 4
    assert cost.layout_bytes(layout, table.layers) == held
    assert held < cache.num_bytes < 1.25 * held  # tables, unfinished pages, and 4 % spare ones


def test_layers_of_latent_attention_are_one_choice(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, tokens: Tensor
) -> None:
    """A saved hybrid is retrained like one in memory; learned sinks are each head's; other rows are refused."""
    model, layout = unequal_model("deepseek_v3"), Layout(("G", "L", "L", "G"), 5, sinks=2)
    apply_layout(model, layout)
    save_with_tokenizer(model, tiny_tokenizer, tmp_path)
    restored, _ = load(tmp_path)
    for trained in (model, restored):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.005)
        for _ in range(3):
            optimizer.zero_grad()
            trained(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
    assert equal_up_to_rounding(logits(restored, tokens), logits(model, tokens))
    add_learned_sinks(model, [torch.arange(4.0)] * 4)
    assert [len(module.logits) for module in learned_sinks(model)] == [4, 4]
    check_generation(model)
    # Rows with a letter for each head, which hybrids had before latents were one choice
    gates = GateConfig(heads=["SSSS"] * 4)
    for refused in (
        lambda: apply_layout(model, Layout(("GLLL",) * 4, 5)),
        lambda: attach_gates(model, gates),
    ):
        with pytest.raises(UserError, match="share one latent, so give one letter per layer"):
            refused()
    section = restored.config.spkv
    section["layout"]["heads"] = ["GLLL"] * 4
    for layer in section["layers"].values():
        layer["num_kv_heads"] = 4
    save_with_tokenizer(restored, tiny_tokenizer, tmp_path / "old")
    with pytest.raises(
        UserError, match="its heads share one latent, so a layout has one letter per layer"
    ):
        load(tmp_path / "old")


def test_costs_count_latents() -> None:
    """Bytes are those of DeepSeek V3's latent and rotary key, FLOPs and memory of passes those of expanded heads."""
    shape = config_size(AutoConfig.for_model("deepseek_v3", num_hidden_layers=3)).shape
    assert (shape.heads_per_layer, shape.words) == ((1, 1, 1), "3 layers x 1 latent of size 576")
    assert cost("full", shape, 1000).kv_cache_bytes == 3 * (512 + 64) * 2 * 1000
    assert shape.attention_width == shape.kv_width == 128 * (128 + 64)


def test_proposals_with_unequal_rows_are_those_of_brute_force() -> None:
    density = np.array([[0.9, 0.2, np.nan], [0.5, 0.8, 0.6], [0.7, np.nan, np.nan]])
    table = HeadScores.from_array(density, kind="share")
    assert propose(table, 3)["densest"].heads == ("GL", "LGL", "G")
    assert solve(table, 3, Constraints(max_per_layer=1), window=8).heads == ("GL", "LGL", "G")
    assert solve(table, 4, Constraints(granularity="layer"), window=8).heads == ("LL", "GGG", "G")
    assert solve(table, 5, Constraints(uniform=True, min_per_layer=1), window=8).heads == (
        "GL",
        "GGG",
        "G",
    )
    assert solve(table, 2, Constraints(global_layers=(0,)), window=8).heads == ("GG", "LLL", "L")
    assert (table.mean, table.num_heads) == (pytest.approx(3.7 / 6), 6)
