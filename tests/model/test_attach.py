"""Test gates and layouts on Hugging Face models: the maths stays the model's, and unsupported models are refused."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    FAMILIES,
    equal_up_to_rounding,
    logits,
    recompute_activations,
    save_with_tokenizer,
    scatter_gates,
    tiny_model,
)
from marks import slow
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.grid import check_grid
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.manifest import MANIFEST
from spkv_nas.model.attach import attach_gates, detach
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.gates import gate_from_logits, predictors
from spkv_nas.model.model_shape import config_shape
from spkv_nas.model.modes import set_gate_mode
from spkv_nas.model.windows import apply_layout

CONFIG = GateConfig(window=6, hidden_size=16)


@pytest.mark.parametrize(
    "family",
    [
        *(
            family if family in ("llama", "qwen3", "gemma3_text", "phi3") else slow(family)
            for family in FAMILIES
        ),
        "gpt_oss",
    ],
)
class TestFamilies:
    def test_open_gates_change_nothing(self, family: str, tokens: Tensor) -> None:
        model = tiny_model(family)
        expected = logits(model, tokens)
        attach_gates(model, CONFIG)
        set_gate_mode(model, "open")
        assert torch.allclose(logits(model, tokens), expected, atol=1e-5)
        set_gate_mode(model, "hard", 0.0)
        assert torch.allclose(logits(model, tokens), expected, atol=1e-5)

    def test_detach_restores_the_model(self, family: str, tokens: Tensor) -> None:
        model = tiny_model(family)
        expected, config = logits(model, tokens), model.config.to_dict()
        attach_gates(model, CONFIG)
        detach(model)
        assert equal_up_to_rounding(logits(model, tokens), expected)
        assert model.config.to_dict() == config
        assert not predictors(model)

    def test_closed_gates_are_a_layout_of_local_heads(self, family: str, tokens: Tensor) -> None:
        model = tiny_model(family)
        hybrid = copy.deepcopy(model)
        attach_gates(model, CONFIG)
        set_gate_mode(model, "hard", 1.0)
        rows = ["LL"] * 4
        apply_layout(hybrid, Layout(tuple(rows), window=6))
        assert torch.allclose(logits(model, tokens), logits(hybrid, tokens), atol=1e-5)

    def test_round_trip_is_exact(
        self, family: str, tokens: Tensor, tmp_path: Path, tiny_tokenizer: object
    ) -> None:
        model = tiny_model(family)
        attach_gates(model, CONFIG)
        scatter_gates(model)
        save_with_tokenizer(model, tiny_tokenizer, tmp_path)  # type: ignore[arg-type]
        restored, _ = load(tmp_path)
        for mode in ("soft", "hard"):
            set_gate_mode(model, mode)
            set_gate_mode(restored, mode)
            assert equal_up_to_rounding(logits(model, tokens), logits(restored, tokens))
        before, after = model.state_dict(), restored.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_more_than_ten_layers_round_trip(
    tokens: Tensor, tmp_path: Path, tiny_tokenizer: object
) -> None:
    """config.json sorts its keys, so that layer 10 comes before layer 2."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"] * 7
    model = tiny_model("gemma3_text", num_hidden_layers=12, layer_types=kinds)
    attach_gates(model, CONFIG)
    scatter_gates(model)
    save(model, tiny_tokenizer, tmp_path)  # type: ignore[arg-type]
    restored, _ = load(tmp_path)
    assert list(predictors(restored)) == list(predictors(model))
    assert equal_up_to_rounding(logits(model, tokens), logits(restored, tokens))


def test_gates_learn_from_the_next_token_loss_alone(tokens: Tensor) -> None:
    model = tiny_model()
    attach_gates(model, CONFIG)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for module in predictors(model).values():
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


def test_gates_start_open() -> None:
    model = tiny_model()
    attach_gates(model, CONFIG, seed=3)
    hidden = torch.randn(2, 5, 32)
    for module in predictors(model).values():
        assert torch.allclose(torch.sigmoid(module(hidden)), torch.tensor(0.9933), atol=5e-3)


def test_the_seed_decides_the_predictors() -> None:
    one, two = tiny_model(), tiny_model()
    attach_gates(one, CONFIG, seed=5)
    attach_gates(two, CONFIG, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_annealing_interpolates_between_soft_and_hard() -> None:
    raw = torch.tensor([[[-2.0, -0.1, 0.1, 3.0]]])
    u, hard = torch.sigmoid(raw), (raw >= 0).float()
    for a in (0.25, 0.9):
        gate = gate_from_logits(raw, "soft", 0.5, a)
        assert gate.log_utility is not None
        assert torch.allclose(gate.log_utility.exp(), (1 - a) * u + a * hard, atol=1e-6)


def test_activation_checkpointing_gives_the_same_gradients(tokens: Tensor) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        attach_gates(model, CONFIG, seed=0)
        if checkpointing:
            recompute_activations(model)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(equal_up_to_rounding(a, b) for a, b in zip(*gradients, strict=True))


class TestLayouts:
    layout = Layout(("GL", "LL", "LG", "GG"), window=5)

    def test_a_layout_of_global_heads_changes_nothing(self, tokens: Tensor) -> None:
        model = tiny_model()
        expected = logits(model, tokens)
        apply_layout(model, Layout(("GG",) * 4, window=5))
        assert torch.allclose(logits(model, tokens), expected, atol=1e-5)

    def test_a_mixed_layout_round_trips(
        self, tokens: Tensor, tmp_path: Path, tiny_tokenizer: object
    ) -> None:
        model = tiny_model()
        dense = logits(model, tokens)
        apply_layout(model, self.layout)
        expected = logits(model, tokens)
        assert not torch.allclose(expected, dense, atol=1e-3)
        save(model, tiny_tokenizer, tmp_path)  # type: ignore[arg-type]
        restored, _ = load(tmp_path)
        assert equal_up_to_rounding(logits(restored, tokens), expected)

    def test_a_model_whose_layers_differ_in_heads(self) -> None:
        check_grid("the grid", [2, 4], "the model", (2, 4))
        with pytest.raises(
            UserError,
            match="the grid is for 2 layers x 2 KV heads, the model has 2 layers x 2 to 4",
        ):
            check_grid("the grid", [2, 2], "the model", [2, 4])
        with pytest.raises(UserError, match="the grid has 4 KV heads in layer 0, the model has 2"):
            check_grid("the grid", [4, 2], "the model", [2, 4])

    def test_another_shape_is_refused(self) -> None:
        with pytest.raises(UserError, match="4 layers x 2 KV heads"):
            apply_layout(tiny_model(), Layout(("GLG",) * 4, window=5))

    def test_a_hybrid_generates_without_a_cache(self, tokens: Tensor) -> None:
        model = tiny_model()
        apply_layout(model, self.layout)
        generated = model.generate(
            tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0
        )
        assert generated.shape == (2, 28)
        again = logits(model, generated[:, :-1])[:, -1].argmax(-1)
        assert torch.equal(again, generated[:, -1])


@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
@pytest.mark.slow  # tests/product/test_python_objects.py compiles one quickly
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2"])
def test_a_compiled_hybrid_computes_the_same(family: str, tokens: Tensor) -> None:
    model = tiny_model(family, head_dim=8)
    apply_layout(model, Layout(("GL", "LL", "GG", "LG"), 6, sinks=2))
    torch._dynamo.reset()
    # In one piece without packed documents
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = model(input_ids=tokens, use_cache=False).logits
    assert torch.allclose(compiled(input_ids=tokens, use_cache=False).logits, expected, atol=1e-5)


class TestRefusals:
    def gated(self) -> PreTrainedModel:
        model = tiny_model()
        attach_gates(model, CONFIG)
        return model

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"cu_seq_lens_q": torch.tensor([0, 24, 48])},
                "documents of one row; this batch has 2",
            ),
            *(
                ({name: torch.ones(4)}, f"'{name}'")
                for name in ("head_mask", "position_bias", "indices", "anything")
            ),
            ({"is_causal": False}, "needs bidirectional or other non-causal attention"),
            (
                {"attention_mask": torch.ones(2, 30)},
                "has 30 columns for 0 cached and 24 new tokens",
            ),
            ({"attention_mask": torch.ones(2, 1, 24, 24)}, "an attention mask of its own"),
        ],
    )
    def test_inputs_that_would_be_ignored(
        self, options: dict[str, Any], message: str, tokens: Tensor
    ) -> None:
        """Any keyword argument of the attention call was ignored, lengths of packed documents among them."""
        with pytest.raises(UserError, match=message):
            self.gated()(input_ids=tokens, **options)

    def test_inputs_without_effect_on_attention(self, tokens: Tensor) -> None:
        model = self.gated()
        options = {
            "token_type_ids": torch.zeros_like(tokens),
            "is_causal": True,
            "output_attentions": False,
        }
        assert equal_up_to_rounding(
            model(input_ids=tokens, **options).logits, logits(model, tokens)
        )

    @pytest.mark.parametrize(
        ("family", "options"),
        [
            ("gemma3_text", {"use_bidirectional_attention": True}),
            ("llama", {"is_causal": False}),
            ("roberta", {"pad_token_id": 0}),
        ],
    )
    def test_attention_that_is_not_causal(self, family: str, options: dict[str, Any]) -> None:
        """It was refused with advice on position ids."""
        with pytest.raises(
            UserError, match="needs bidirectional or other non-causal attention"
        ) as error:
            attach_gates(tiny_model(family, **options), CONFIG)
        assert "position" not in str(error.value)

    def test_layers_that_were_made_bidirectional(self, tokens: Tensor) -> None:
        model = self.gated()
        model.model.layers[2].self_attn.is_causal = False
        with pytest.raises(UserError, match="needs bidirectional or other non-causal attention"):
            model(input_ids=tokens)

    def test_a_window_that_was_changed(self, tokens: Tensor) -> None:
        model = tiny_model("mistral", sliding_window=12)
        apply_layout(model, Layout(("LL",) * 4, 6))
        model.config.sliding_window = 7
        with pytest.raises(UserError, match="sliding window of a layer was changed from 12 to 7"):
            model(input_ids=tokens)

    def test_keys_that_are_compressed(self) -> None:
        """The model was hooked, and longer texts ended in an AssertionError."""
        options = {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 12,
        }
        model = tiny_model("deepseek_v4", **options)
        with pytest.raises(
            UserError,
            match="layers of type compressed_sparse_attention, heavily_compressed_attention",
        ):
            attach_gates(model, CONFIG)

    def test_more_keys_than_queries(self) -> None:
        """An assertion of ours failed where a class brings keys of its own."""
        attend = AttentionInterface()["spkv"]
        q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 5, 8)
        with pytest.raises(UserError, match="from 3 tokens to 5 keys"):
            attend(torch.nn.Module(), q, k, k, None)

    def test_attention_weights(self, tokens: Tensor) -> None:
        with pytest.raises(UserError, match="output_attentions"):
            self.gated()(input_ids=tokens, output_attentions=True)

    def test_a_cache(self, tokens: Tensor) -> None:
        with pytest.raises(UserError, match="use_cache=False"):
            self.gated()(input_ids=tokens, use_cache=True)

    def test_a_window_of_the_model_that_is_too_short(self, tokens: Tensor) -> None:
        model = tiny_model("mistral", sliding_window=10)
        attach_gates(model, CONFIG)
        with pytest.raises(UserError, match="sliding window of 10"):
            model(input_ids=tokens)

    @pytest.mark.parametrize("family", ["llama4_text", "phimoe"])
    def test_limits_that_only_the_mask_has(self, family: str) -> None:
        options = {"num_local_experts": 2, "head_dim": 8}
        options |= (
            {"attention_chunk_size": 12, "intermediate_size_mlp": 48}
            if family == "llama4_text"
            else {}
        )
        model = tiny_model(family, sliding_window=12, **options)
        with pytest.raises(UserError, match="its mask alone limits attention to 12 keys"):
            attach_gates(model, CONFIG)
        model = tiny_model("phimoe", sliding_window=128, **options)  # as long as the context
        attach_gates(model, CONFIG)

    def test_a_class_without_the_attention_interface(self) -> None:
        config = AutoConfig.for_model("bloom", vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
        with pytest.raises(
            UserError, match=r"Bloom.* 0 times.*\n.* does not use the attention interface"
        ):
            attach_gates(AutoModelForCausalLM.from_config(config), CONFIG)

    def test_layers_that_attend_twice(self) -> None:
        with pytest.raises(
            UserError,
            match=r"DiffLlama.* 4 attention layers .* 8 times.*\na layer that is repeated",
        ):
            attach_gates(tiny_model("diffllama"), CONFIG)

    def test_a_model_without_attention(self) -> None:
        config = AutoConfig.for_model("mamba", vocab_size=97, hidden_size=16, num_hidden_layers=2)
        with pytest.raises(UserError, match="its 0 attention layers"):
            attach_gates(AutoModelForCausalLM.from_config(config), CONFIG)

    def test_gates_twice(self) -> None:
        with pytest.raises(UserError, match="already has gates"):
            attach_gates(self.gated(), CONFIG)

    @pytest.mark.parametrize(("mode", "tau"), [("loud", 0.5), ("hard", 1.5)])
    def test_modes(self, mode: str, tau: float) -> None:
        with pytest.raises(UserError):
            set_gate_mode(self.gated(), mode, tau)

    def test_a_model_without_gates(self) -> None:
        with pytest.raises(UserError, match="no gates"):
            set_gate_mode(tiny_model(), "soft")


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("llama", {}, (4, 4, 2, 8)),
        ("qwen3", {"head_dim": 16}, (4, 4, 2, 16)),
        ("gpt_neox", {"num_key_value_heads": None}, (4, 4, 4, 8)),
        ("gpt2", {"n_layer": 3, "n_head": 2, "n_embd": 32}, (3, 2, 2, 16)),
    ],
)
def test_number_of_heads_from_the_config(
    family: str, options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """Families without grouped queries, and families with other config keys."""
    if family != "gpt2":
        options = {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        } | options
    shape = config_shape(AutoConfig.for_model(family, **options))
    assert dataclasses.astuple(shape)[:4] == expected
    assert shape.grid == expected[::2]


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path: Path, tiny_tokenizer: object) -> Path:
        save(tiny_model(), tiny_tokenizer, tmp_path)  # type: ignore[arg-type]
        return tmp_path

    def test_a_flipped_bit(self, folder: Path) -> None:
        """The manifest detects it; safetensors has no checksum."""
        weights = folder / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-10] ^= 1
        weights.write_bytes(data)
        with pytest.raises(UserError, match=r"damaged: model\.safetensors"):
            load(folder)

    def test_a_truncated_file(self, folder: Path) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        (folder / MANIFEST).unlink()  # a folder that another tool wrote
        with pytest.raises(UserError, match=r"model\.safetensors are damaged or truncated"):
            load(folder)

    def test_missing_model(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="cannot load model"):
            load(tmp_path / "missing")
