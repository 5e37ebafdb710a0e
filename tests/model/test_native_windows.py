"""Test layers with a native sliding window: no layout, signal, proposal or export treats their heads as global."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import check_generation, logits, make_table, save_with_tokenizer, tiny_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import spkv_nas
from spkv_nas import GateConfig, attach_gates, detach, set_gate_mode
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base.errors import UserError
from spkv_nas.contrib.search.space import Space
from spkv_nas.cost.cache_cost import CONTEXT, CacheCost, cache_share, full_bytes, layout_share
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.attention import GLOBAL_WINDOW, layer_states
from spkv_nas.model.checkpoint import load
from spkv_nas.model.density_tracker import layout_density
from spkv_nas.model.export.export import export
from spkv_nas.model.export.native import native_config
from spkv_nas.model.export.target import TargetError
from spkv_nas.model.gates import predictors
from spkv_nas.model.windows import apply_layout, every_head_local
from spkv_nas.probing.measure import measure_signal
from spkv_nas.proposal.constraints import Constraints, solve
from spkv_nas.proposal.propose import propose
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.layout_explorer import explorer_data
from spkv_nas.report.verdict import conclude

WINDOW = 6
NATIVE = {"gemma3_text": 4, "gpt_oss": 8}  # sliding windows of layers 0 and 2
ALL_GLOBAL, ALL_LOCAL = ("GG",) * 4, ("LL",) * 4
SIGNALS: dict[str, dict[str, object]] = {
    "add-one-head": {},
    "leave-one-out": {},
    "attention-mass": {},
    "retrieval": {},
    "duo": {"steps": 2},
    "head-gates": {"steps": 2, "budget": 2},
    "regression": {"budget": 3, "num_layouts": 30},
}


@pytest.fixture(params=NATIVE)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Return a model with two sliding layers, whose attention is far from uniform."""
    model = tiny_model(request.param, vocab_size=300)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name and parameter.ndim == 2:
                parameter *= 6
    return model


@pytest.fixture
def text() -> Tensor:
    return torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))


class TestLayouts:
    def test_global_letters_keep_the_native_window(
        self, model: PreTrainedModel, text: Tensor
    ) -> None:
        expected = logits(model, text)
        for rows in (ALL_GLOBAL, ("LL", "GG") * 2, ("GL", "GG") * 2):
            apply_layout(model, Layout(rows, WINDOW))
            assert torch.allclose(logits(model, text), expected, atol=1e-5)

    @pytest.mark.parametrize("window", [2, 20])
    def test_local_windows_change_full_layers_alone(
        self, window: int, model: PreTrainedModel, text: Tensor
    ) -> None:
        size = NATIVE[model.config.model_type]
        full = logits(model, text)
        apply_layout(model, Layout(("LL", "LG", "LL", "GG"), window))
        windows = [state.windows for state in layer_states(model)]
        assert windows == [(size,) * 2, (window, GLOBAL_WINDOW), (size,) * 2, (GLOBAL_WINDOW,) * 2]
        assert not torch.allclose(logits(model, text), full, atol=1e-4)

    def test_without_full_layers_the_native_window_is_that_of_global_heads(
        self, text: Tensor
    ) -> None:
        model = tiny_model("mistral", vocab_size=300, sliding_window=10)
        expected = logits(model, text)
        apply_layout(model, Layout(ALL_GLOBAL, WINDOW))
        assert torch.allclose(logits(model, text), expected, atol=1e-5)
        apply_layout(model, Layout(("LG",) * 4, WINDOW))
        assert {state.windows for state in layer_states(model)} == {(WINDOW, 10)}
        apply_layout(model, Layout(("LG",) * 4, 20))
        assert {state.windows for state in layer_states(model)} == {(10, 10)}

    def test_gates_are_where_heads_can_be_global(self, text: Tensor) -> None:
        """Layers of a Qwen2 with a window everywhere got none, and global heads beside gates no native window."""
        sliding = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 10}
        model = tiny_model("qwen2", vocab_size=300, **sliding)
        expected = logits(model, text)
        attach_gates(model, GateConfig(window=WINDOW))
        assert len(predictors(model)) == 4
        detach(model)
        attach_gates(model, GateConfig(window=WINDOW, heads=["GG", "GG", "GG", "SG"]))
        set_gate_mode(model, "open")
        assert torch.allclose(logits(model, text[:, :10]), expected[:, :10], atol=1e-5)
        assert [state.windows for state in layer_states(model)][:3] == [(10, 10)] * 3

    def test_the_density_counts_global_heads(self) -> None:
        model = tiny_model("mistral", vocab_size=300, sliding_window=10)
        apply_layout(model, Layout(("LL", "LG", "GG", "LL"), WINDOW))
        assert layout_density(model) == 3 / 8

    def test_generation_equals_whole_passes(self, model: PreTrainedModel) -> None:
        apply_layout(model, Layout(("GL", "LG", "LL", "GG"), WINDOW, sinks=2))
        check_generation(model)

    def test_scores_and_the_all_local_model_are_those_of_layouts(
        self, model: PreTrainedModel, blocks: TokenBlocks
    ) -> None:
        full, whole, local = zero_shot(
            model, [None, Layout(ALL_GLOBAL, 2), Layout(ALL_LOCAL, 2)], blocks
        )
        assert whole.mean == pytest.approx(full.mean, rel=1e-6)
        with every_head_local(model, 2):
            assert zero_shot_of_now(model, blocks) == pytest.approx(local.mean, rel=1e-6)
        assert local.mean != pytest.approx(full.mean, rel=1e-5)

    def test_exports_restore_them(
        self,
        model: PreTrainedModel,
        text: Tensor,
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        layout = Layout(("GL", "LG", "LL", "GG"), WINDOW)
        save_with_tokenizer(model, tiny_tokenizer, tmp_path / "dense")
        assert export(layout, tmp_path / "dense", tmp_path / "out").target == "spkv"
        restored, _ = load(tmp_path / "out")
        apply_layout(model, layout)
        assert torch.allclose(logits(restored, text), logits(model, text), atol=1e-6)
        assert [state.windows for state in layer_states(restored)] == [
            state.windows for state in layer_states(model)
        ]


def zero_shot_of_now(model: PreTrainedModel, blocks: TokenBlocks) -> float:
    """Return the NLL of the model with its present windows."""
    tokens = torch.as_tensor(np.asarray(blocks.tokens), dtype=torch.long)
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens, use_cache=False).loss)


@pytest.mark.filterwarnings("ignore:the model predicts only")
@pytest.mark.filterwarnings("ignore:a sum of head gains")
@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("signal", SIGNALS)
def test_signals_score_only_heads_that_can_be_global(
    signal: str, family: str, blocks: TokenBlocks, tmp_path: Path
) -> None:
    """Also with a window shorter than the native one; the table's layouts then have no other global heads."""
    model = tiny_model(family, vocab_size=300, num_key_value_heads=4)
    measured = measure_signal(signal, model, blocks, window=3, sinks=0, **SIGNALS[signal])  # type: ignore[arg-type]
    measured.write(tmp_path)
    table, size = HeadScores.read(tmp_path), NATIVE[family]
    assert table.record.native_windows == [size, None] * 2
    assert (table.layers, table.num_candidates, table.native_heads) == ([1, 3], 8, (size,) * 8)
    assert not table.values[::2].any()
    assert table.values[1::2].any()
    for name, layout in propose(table, 3).items():
        assert layout.num_global == (4 if name.startswith("interleaved") else 3)
        assert not layout.global_mask[::2].any()
        assert layout.grid == (4, 4)


def test_the_default_budget_is_of_the_heads_that_can_be_global(
    model: PreTrainedModel, blocks: TokenBlocks
) -> None:
    table = spkv_nas.head_gates(model, blocks, window=3, sinks=0, steps=2)
    assert table.record.budget == 1
    assert table.values[1::2].sum() == pytest.approx(1, abs=1e-6)
    with pytest.raises(
        UserError,
        match="budget 5 means 5 global KV heads, but the model has 4 KV heads that can be glo",
    ):
        spkv_nas.head_gates(model, blocks, window=3, sinks=0, budget=5)


class TestProposals:
    @pytest.fixture
    def table(self) -> HeadScores:
        """Return scores of a model whose layers 0 and 2 are local by design; layer 1 has negative gains."""
        scores = [[0.0, 0.0], [-0.2, -0.1], [0.0, 0.0], [0.3, 0.4]]
        metadata = {
            "native_windows": [4, None, 4, None],
            "head_dim": 8,
            "dtype": "bfloat16",
            "kind": "gain",
        }
        return replace(make_table(scores), window=10, record=ProbeRecord.of(metadata))

    def test_constraints_leave_native_layers_local(self, table: HeadScores) -> None:
        assert solve(table, 8, Constraints(min_per_layer=1)).heads == ("LL", "GG", "LL", "GG")
        with pytest.raises(UserError, match="global-layers: layer 2 has a native sliding window"):
            solve(table, 4, Constraints(global_layers=(2,)))

    def test_searches_leave_native_layers_local(self, table: HeadScores) -> None:
        space = Space(table, (2, 3), 10, Constraints().on(table))
        space.check()
        generator = np.random.default_rng(0)
        layouts = [space.random(generator) for _ in range(20)]
        assert len({layout.heads for layout in layouts}) > 4
        assert not any(layout.global_mask[::2].any() for layout in layouts)

    def test_native_heads_have_the_bytes_of_their_window(self, table: HeadScores) -> None:
        """Two global heads of 100 keys, two local ones of 10, four native ones of 4; 32 bytes a key."""
        requirements = Requirements(context=100, kv_bytes="9KB")
        cost = requirements.cache_cost(table, None)
        assert isinstance(cost, CacheCost)
        assert cost.total(2, 8) == 32 * (2 * 100 + 2 * 10 + 4 * 4)
        several = Layout(("LL", "GL", "LL", "ML"), windows={"L": 10, "M": 20}, sinks=1)
        share = (100 + 2 * 11 + 21 + 4 * 4) / (4 * 100 + 4 * 4)
        assert layout_share(several, 100, table.native_windows) == pytest.approx(share)
        with pytest.raises(UserError, match="has 4 layers, the model 5"):
            layout_share(several, 100, [None] * 5)
        assert requirements.limit(table, None, None).budget == 2
        assert Requirements(context=100, kv_bytes="1MB").limit(table, None, None).budget == 4

    def test_a_window_of_all_layers_limits_global_heads(self, table: HeadScores) -> None:
        """Two of eight heads are local, with a window of 10 and a sink token; the others see 40 keys."""
        table = table.with_record(native_windows=[40] * 4, sinks=1)
        assert (table.layers, table.native_heads, table.global_window) == ([0, 1, 2, 3], (), 40)
        cost = Requirements(context=100, kv_bytes="10KB").cache_cost(table, None)
        assert cost is not None
        assert cost.total(6, 8) == 32 * (6 * 40 + 2 * 11)
        wide = Requirements(context=100, kv_bytes="10KB").cache_cost(table, 50)
        assert wide is not None
        assert wide.total(6, 8) == 32 * 8 * 40
        assert full_bytes(table) == 32 * 8 * 40
        assert cache_share(table, 6 / 8) == pytest.approx((6 * 40 + 2 * 11) / (8 * 40))
        inputs = ReportInputs(table, {})
        data = explorer_data(inputs, conclude(inputs))
        assert data is not None
        assert data["signals"][0]["cache"] == {
            "token": 32.0,
            "window": 10,
            "sinks": 1,
            "global": 40,
        }

    def test_probe_yaml_records_it(self, blocks: TokenBlocks) -> None:
        model = tiny_model("mistral", vocab_size=300, sliding_window=20)
        table = measure_signal("add-one-head", model, blocks, window=WINDOW)
        assert table.record.native_windows == [20] * 4
        assert (table.global_window, table.num_candidates) == (20, 8)

    def test_the_page_counts_them(self, table: HeadScores) -> None:
        full = 4 * CONTEXT + 4 * 4
        assert full_bytes(table) == 32 * full
        assert cache_share(table, 4 / 8) == 1
        assert cache_share(table, 2 / 8) == pytest.approx((2 * CONTEXT + 2 * 10 + 4 * 4) / full)
        inputs = ReportInputs(table, {})
        data = explorer_data(inputs, conclude(inputs))
        assert data is not None
        assert data["signals"][0]["cache"] == {"token": 32.0, "window": 10, "native": (4,) * 4}


class TestNativeExport:
    def test_windows_of_native_layers_stay(self) -> None:
        config = tiny_model("gpt_oss").config
        full, sliding = "full_attention", "sliding_attention"
        one = native_config(config, Layout(("GG", "LL", "GL", "GG"), 8))
        assert (one.layer_types, one.sliding_window) == ([sliding, sliding, sliding, full], 8)
        same = native_config(config, Layout(ALL_GLOBAL, 6, sinks=2))
        assert (same.layer_types, same.sliding_window) == ([sliding, full] * 2, 8)
        with pytest.raises(
            TargetError, match="windows of 6 and 8 keys, of which layer_types can express one"
        ):
            native_config(config, Layout(("GG", "LL", "GL", "GG"), 6))
        with pytest.raises(TargetError, match="layer 1 mixes global and local heads"):
            native_config(config, Layout(("GG", "GL", "GL", "GG"), 8))

    def test_sink_tokens_of_models_with_a_window_everywhere_are_refused(self) -> None:
        """They were found missing only when the written folder was compared."""
        config = tiny_model("mistral", sliding_window=20).config
        with pytest.raises(TargetError, match="its local heads see 2 sink tokens"):
            native_config(config, Layout(ALL_LOCAL, 6, sinks=2))
        assert native_config(config, Layout(ALL_GLOBAL, 6, sinks=2)).sliding_window == 20

    def test_the_encoding_of_gemma_refuses_other_layers(self) -> None:
        config = tiny_model("gemma3_text").config
        assert native_config(config, Layout(ALL_GLOBAL, 4)).layer_types == config.layer_types
        with pytest.raises(TargetError, match="position encoding, which would change in layers 1"):
            native_config(config, Layout(("LL", "LL", "LL", "GG"), 4))
