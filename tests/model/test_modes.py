"""Test gate modes, one per model: what sets the mode, what reads it, and what restores it."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import equal_up_to_rounding, gated, logits, recompute_activations, tiny_model
from marks import slow_after
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import document_nll, evaluate
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.attach import attach_gates, detach
from spkv_nas.model.attention import LayerState, layer_states, watch_logits
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.config_section import checkpoint_layout, gate_config
from spkv_nas.model.gates import predictors
from spkv_nas.model.generation import generate
from spkv_nas.model.modes import gate_mode, gate_settings, set_gate_mode, set_price
from spkv_nas.model.windows import add_learned_sinks, apply_layout, full_attention
from spkv_nas.probing.density import probe


class TestThreshold:
    def test_a_threshold_that_is_set_is_that_of_the_model(
        self, blocks: TokenBlocks, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """``evaluate``, ``probe``, ``generate`` and ``save`` use it instead of the config's."""
        model = gated()
        set_gate_mode(model, "soft", 0.8)
        assert evaluate(model, blocks).tau == 0.8
        assert probe(model, blocks).tau == 0.8
        assert generate(model, tiny_tokenizer, "the fox", max_new_tokens=2).tau == 0.8
        save(model, tiny_tokenizer, tmp_path)
        restored, _ = load(tmp_path)
        config = gate_config(restored)
        assert config is not None
        assert (config.tau, gate_settings(restored).tau) == (0.8, 0.8)
        set_gate_mode(model, "hard")
        assert gate_settings(model).tau == 0.8

    def test_a_temporary_threshold_is_restored(self) -> None:
        model = gated()
        set_gate_mode(model, "sampled", 0.3, anneal=0.25, p_min=0.1)
        set_price(model, 0.5)
        before, section = copy.copy(gate_settings(model)), copy.deepcopy(model.config.spkv)

        def borrow() -> None:
            with gate_mode(model, "hard", 0.9):
                assert (gate_settings(model).mode, gate_settings(model).tau) == ("hard", 0.9)
                assert model.config.spkv["gates"]["tau"] == 0.9
                raise RuntimeError

        with pytest.raises(RuntimeError):
            borrow()
        assert gate_settings(model) == before
        assert model.config.spkv == section

    def test_a_copy_has_its_own(self) -> None:
        model = gated("gemma3_text")
        twin = copy.deepcopy(model)
        set_gate_mode(twin, "hard", 0.9, anneal=0.5)
        configs = [gate_config(model), gate_config(twin)]
        assert [config.tau for config in configs if config] == [0.4, 0.9]
        assert gate_settings(model).mode == "soft"
        for each in (model, twin):
            assert len({id(state.settings) for state in layer_states(each)}) == 1
        assert {id(s) for s in layer_states(model)}.isdisjoint(id(s) for s in layer_states(twin))


class TestLeftAsItWas:
    def test_probe(self, blocks: TokenBlocks) -> None:
        """``probe`` restores the gate mode, so that later training has gradients."""
        model = gated().train()
        set_gate_mode(model, "soft", 0.3, anneal=0.25)
        before = copy.copy(gate_settings(model))
        probe(model, blocks, 0.7)
        assert gate_settings(model) == before
        assert model.training
        set_gate_mode(model, "soft")
        tokens = torch.from_numpy(blocks.tokens.astype(np.int64))
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        assert all(
            p.grad is not None for module in predictors(model).values() for p in module.parameters()
        )

    def test_training_mode_survives_an_error(self, blocks: TokenBlocks) -> None:
        """A failed evaluation restores training mode, and with it dropout."""
        model = gated().train()
        model.model.norm.eval()

        def fail(*_: int) -> None:
            raise RuntimeError

        for run in (document_nll, probe):
            with pytest.raises(RuntimeError):
                run(model, blocks, progress=fail)
            assert model.training
            assert not model.model.norm.training
        assert not any(predictor._forward_hooks for predictor in predictors(model).values())

    def test_generate(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        """``generate`` restores the training mode."""
        model = gated().train()
        generate(model, tiny_tokenizer, "the fox", max_new_tokens=2)
        assert model.training
        assert gate_settings(model).mode == "soft"


class TestWindows:
    def test_windows_of_a_layer_are_never_stale(self, tokens: Tensor) -> None:
        """Assigned windows take effect like those set by the method."""
        model = tiny_model()
        apply_layout(model, Layout(("GL", "LL", "LG", "GG"), window=5))
        logits(model, tokens)
        for state in layer_states(model):
            state.windows = tuple(reversed(state.windows or ()))
        turned = tiny_model()
        apply_layout(turned, Layout(("LG", "LL", "GL", "GG"), window=5))
        assert equal_up_to_rounding(logits(model, tokens), logits(turned, tokens))

    @pytest.mark.parametrize(
        ("state", "silent", "gated"),
        [
            (LayerState(2, None), 1 << 30, 1 << 30),
            (LayerState(2, 9), 9, 9),
            (LayerState(2, None, gate_window=6), 1 << 30, 6),
            (LayerState(2, 9, gate_window=6), 9, 6),
        ],
    )
    def test_of_a_layer(self, state: LayerState, silent: int, gated: int) -> None:
        assert state.head_windows(gated=False) == (silent, silent)
        assert state.head_windows(gated=True) == (gated, gated)
        state.windows = (3, 4)
        assert state.head_windows(gated=False) == state.head_windows(gated=True) == (3, 4)
        assert state.checkpoint_window == (state.native_window or 1 << 30)

    def test_full_attention_runs_no_predictor(self, tokens: Tensor) -> None:
        model, seen = gated(), []
        with watch_logits(model, lambda *call: seen.append(call)), full_attention(model):
            logits(model, tokens)
        assert not seen

    def test_a_layout_is_recognised(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model = tiny_model()
        assert checkpoint_layout(model) is None
        apply_layout(model, Layout(("GL", "LL", "LG", "GG"), window=5, strategy="mine"), window=7)
        save(model, tiny_tokenizer, tmp_path)
        for each in (model, load(tmp_path)[0]):
            layout = checkpoint_layout(each)
            assert layout is not None
            assert (layout.heads, layout.window) == (("GL", "LL", "LG", "GG"), 7)
        attach_gates(model, GateConfig(window=6))
        assert checkpoint_layout(model) is None


class TestWatch:
    def test_sees_the_gates_of_every_layer_that_has_some(self, tokens: Tensor) -> None:
        model = gated("gemma3_text")
        seen: list[tuple[int, tuple[int, ...]]] = []
        watch = watch_logits(
            model, lambda layer, values, _: seen.append((layer, tuple(values.shape)))
        )
        logits(model, tokens)
        watch.close()
        logits(model, tokens)
        assert seen == [(1, (2, 2, 24)), (3, (2, 2, 24))]

    def test_dry_runs_in_two_threads_do_not_see_each_others_calls(self) -> None:
        """Each thread records its calls separately."""
        barrier = threading.Barrier(2, timeout=20)

        def wait(*_: object) -> None:
            barrier.wait()

        def attach(family: str) -> tuple[PreTrainedModel, int]:
            model = tiny_model(family)
            with model.get_input_embeddings().register_forward_pre_hook(wait):
                attach_gates(model, GateConfig(window=6))
            return model, len(layer_states(model))

        with ThreadPoolExecutor(2) as threads:
            for model, count in threads.map(attach, ("llama", "qwen2")):
                assert count == 4
                assert all(
                    layer.self_attn.spkv in layer_states(model) for layer in model.model.layers
                )


class TestCompile:
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # of torch, about what it traces
    @pytest.mark.parametrize("mode", ["soft", "hard"])
    @pytest.mark.parametrize("recompute", slow_after(1, [False, True]))
    def test_decoder_layers_compile_without_a_graph_break(
        self, mode: str, recompute: bool, tokens: Tensor
    ) -> None:
        torch.compiler.reset()
        model = gated().train()
        set_gate_mode(model, mode)
        if recompute:
            recompute_activations(model)
        expected = self.gradients(model, tokens)
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        compiled = self.gradients(model, tokens)
        for one, other in zip(expected, compiled, strict=True):
            assert torch.allclose(one, other, atol=1e-5)
        torch.compiler.reset()

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # of torch, about what it traces
    def test_layers_of_a_hybrid_compile_without_a_graph_break(self, tokens: Tensor) -> None:
        """With sink tokens and learned sinks; on a CPU, windows that differ within a layer are read from a tensor."""
        torch.compiler.reset()
        model = tiny_model().train()
        apply_layout(model, Layout(("GG", "LL", "LL", "GG"), 4, sinks=1))
        add_learned_sinks(model)
        expected = self.gradients(model, tokens)
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        for one, other in zip(expected, self.gradients(model, tokens), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
        torch.compiler.reset()

    def gradients(self, model: PreTrainedModel, tokens: Tensor) -> list[Tensor]:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]


def test_zero_shot_on_a_gated_model_leaves_its_settings(blocks: TokenBlocks) -> None:
    model = gated()
    set_gate_mode(model, "sampled", 0.3, anneal=0.25, p_min=0.1)
    before = copy.copy(gate_settings(model))
    zero_shot(model, [None, Layout(("GL",) * 4, 6)], blocks)
    assert gate_settings(model) == before
    detach(model)
    with pytest.raises(UserError, match="no gates"):
        gate_settings(model)
