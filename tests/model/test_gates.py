"""Test the paper's variants of gates and predictors: each does what it claims, and each has an effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import equal_up_to_rounding, logits, recompute_activations, scatter_gates, tiny_model
from pydantic import ValidationError
from spkv_kernels import attention
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.gates import gate_from_logits, predictors, priced
from spkv_nas.model.modes import set_gate_mode, set_price
from spkv_nas.model.windows import apply_layout
from spkv_nas.probing.density import probe


def gated(**options: Any) -> PreTrainedModel:
    model = tiny_model()
    attach_gates(model, GateConfig(window=6, hidden_size=16, **options), seed=0)
    return model


class TestSampled:
    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_the_gradient_follows_its_definition(self, backend: str) -> None:
        """Paper, "Straight-through gradient estimator": g.detach() + log u - log u.detach(), in float64."""
        torch.manual_seed(0)
        q, k, v, weight = (torch.randn(2, 4, 40, 8, dtype=torch.float64) for _ in range(4))
        k, v = k[:, :2], v[:, :2]
        gate = torch.randn(2, 2, 40, dtype=torch.float64)
        grads = []
        for by_definition in (True, False):
            inputs = [x.clone().requires_grad_() for x in (q, k, v, gate)]
            torch.manual_seed(5)
            if by_definition:
                kept = gate_from_logits(inputs[3].detach(), "sampled", 0.5).log_utility
                assert kept is not None
                log_u = torch.nn.functional.logsigmoid(inputs[3])
                bias = torch.where(kept == 0, 0.0, -torch.inf) + log_u - log_u.detach()
                age = torch.arange(40)[:, None] - torch.arange(40)
                bias = torch.where(age < 6, 0.0, bias[:, :, None]).masked_fill(age < 0, -torch.inf)
                keys, values = (x.repeat_interleave(2, 1) for x in inputs[1:3])
                scores = inputs[0] @ keys.mT / 8**0.5 + bias.repeat_interleave(2, 1)
                out = scores.softmax(-1) @ values
            else:
                sampled = gate_from_logits(inputs[3], "sampled", 0.5)
                out = attention(
                    *inputs[:3], window=6, log_utility=sampled.log_utility, backend=backend
                )
            (out * weight).sum().backward()
            grads.append([x.grad for x in inputs])
        for expected, actual in zip(*grads, strict=True):
            assert torch.allclose(actual, expected, rtol=1e-10, atol=1e-12)
        assert grads[1][3].count_nonzero() > 20

    def test_probabilities_are_utilities_clipped(self) -> None:
        torch.manual_seed(0)
        far = torch.tensor([-20.0, -1.0, 0.5, 20.0, -torch.inf, torch.inf])
        sample = far.expand(1, 20_000, 6).transpose(1, 2)
        for p_min in (0.0, 0.1):
            bias = gate_from_logits(sample, "sampled", 0.5, p_min=p_min).log_utility
            assert bias is not None
            assert set(bias.unique().tolist()) == {0.0, -torch.inf}
            expected = torch.sigmoid(far).clamp(p_min, 1 - p_min)
            expected[4:] = torch.tensor([0.0, 1.0])  # heads without a gate are not sampled
            assert torch.allclose((bias == 0).double().mean((0, 2)).float(), expected, atol=0.015)

    def test_annealing_moves_probabilities_to_the_threshold(self) -> None:
        torch.manual_seed(0)
        sample = torch.tensor([-1.0, 1.0])[:, None].expand(1, 2, 20_000)
        gate = gate_from_logits(sample, "sampled", 0.5, anneal=0.75)
        assert gate.keep is not None
        u = torch.sigmoid(torch.tensor([-1.0, 1.0]))
        expected = 0.25 * u + 0.75 * torch.tensor([0.0, 1.0])
        assert torch.allclose(gate.keep.double().mean((0, 2)).float(), expected, atol=0.015)

    def test_sampling_is_reproducible_and_recomputable(self, tokens: Tensor) -> None:
        """Recomputation in the backward pass samples the same gates."""
        result = []
        for recompute in (False, True, False):
            model = gated(bias=0.0).train()
            scatter_gates(model)
            set_gate_mode(model, "sampled")
            if recompute:
                recompute_activations(model)
            torch.manual_seed(7)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            result.append([loss.detach(), *(p.grad for p in model.parameters())])
        for other in result[1:]:
            assert all(equal_up_to_rounding(a, b) for a, b in zip(result[0], other, strict=True))
        with torch.no_grad():
            again = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        assert again != result[0][0]  # another draw


class TestPredictor:
    def test_linear_has_one_layer(self) -> None:
        for module in predictors(gated(predictor="linear")).values():
            assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
                "down.weight": (2, 32),
                "down.bias": (2,),
            }

    def test_bidirectional_sees_both_sides(self) -> None:
        module = next(iter(predictors(gated(predictor="bidirectional", kernel_size=5)).values()))
        hidden = torch.randn(1, 20, 32)
        changed = hidden.clone()
        changed[:, 10] += 1.0
        moved = (module(hidden) != module(changed)).any(1)[0]
        assert moved.nonzero()[:, 0].tolist() == [8, 9, 10, 11, 12]

    def test_bidirectional_leaves_the_model_causal(self, tokens: Tensor) -> None:
        model = gated(predictor="bidirectional", kernel_size=11, bias=0.0)
        scatter_gates(model)
        set_gate_mode(model, "hard", 0.5)
        before = logits(model, tokens)
        tokens[:, 15:] = 3
        assert equal_up_to_rounding(logits(model, tokens)[:, :15], before[:, :15])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kernel_size": 13}, "looks 6 tokens ahead, but must look less than the window of 6"),
            ({"kernel_size": 4}, "kernel_size must be odd"),
        ],
    )
    def test_look_ahead_past_the_window(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValidationError, match=message):
            GateConfig(window=6, predictor="bidirectional", **options)

    def test_initial_weights(self) -> None:
        one, three = (
            next(iter(predictors(gated(init_scale=scale)).values())) for scale in (1.0, 3.0)
        )
        assert torch.allclose(three.down.weight, 3 * one.down.weight)
        assert torch.allclose(three.up.weight, 3 * one.up.weight)
        flat = next(iter(predictors(gated(init_scale=0.0, bias=2.5)).values()))
        assert (flat(torch.randn(1, 4, 32)) == 2.5).all()

    @pytest.mark.parametrize(
        "options", [{"predictor": "linear"}, {"predictor": "bidirectional", "kernel_size": 5}]
    )
    def test_round_trip(
        self, options: dict[str, Any], tokens: Tensor, tmp_path: Path, tiny_tokenizer: object
    ) -> None:
        model = gated(sinks=2, **options)
        scatter_gates(model)
        save(model, tiny_tokenizer, tmp_path)  # type: ignore[arg-type]
        assert equal_up_to_rounding(logits(load(tmp_path)[0], tokens), logits(model, tokens))


def test_sinks_are_always_kept(tokens: Tensor) -> None:
    q, k, v = (torch.randn(1, 2, 24, 8) for _ in range(3))
    module = next(iter(predictors(gated(sinks=3)).values()))
    result = module(torch.randn(1, 24, 32))
    keep = gate_from_logits(result, "hard", 1.0).keep
    assert keep is not None
    assert keep.nonzero()[:, 2].tolist() == [0, 1, 2] * 2
    far = attention(q, k, v, window=6, keep=keep)
    scores = q @ k.mT / 8**0.5
    age = torch.arange(24)[:, None] - torch.arange(24)
    visible = (age >= 0) & ((age < 6) | (torch.arange(24) < 3))
    assert torch.allclose(far, scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v, atol=1e-5)
    model = gated(sinks=3)
    set_gate_mode(model, "hard", 1.0)
    plain = gated()
    set_gate_mode(plain, "hard", 1.0)
    assert not equal_up_to_rounding(logits(model, tokens), logits(plain, tokens))


class TestHeads:
    ROWS = ("SG", "LL", "GG", "SL")

    @pytest.fixture
    def model(self) -> PreTrainedModel:
        model = gated(heads=list(self.ROWS), bias=0.0)
        scatter_gates(model)
        return model

    @pytest.mark.parametrize(
        ("mode", "tau", "letter"), [("hard", 1.0, "L"), ("open", 0.5, "G"), ("hard", 0.0, "G")]
    )
    def test_closed_or_open_gates_are_a_layout(
        self, model: PreTrainedModel, mode: str, tau: float, letter: str, tokens: Tensor
    ) -> None:
        set_gate_mode(model, mode, tau)
        hybrid = tiny_model()
        apply_layout(hybrid, Layout(tuple(row.replace("S", letter) for row in self.ROWS), 6))
        assert torch.allclose(logits(model, tokens), logits(hybrid, tokens), atol=1e-5)

    @pytest.mark.parametrize("mode", ["soft", "sampled"])
    def test_only_gated_heads_learn(
        self, model: PreTrainedModel, mode: str, tokens: Tensor
    ) -> None:
        set_gate_mode(model, mode)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        gradients = [module.down.weight.grad.abs().sum(1) for module in predictors(model).values()]
        assert [(g > 0).tolist() for g in gradients] == [[True, False], [True, False]]

    def test_a_probe_measures_heads_without_gates(self, model: PreTrainedModel) -> None:
        text = np.random.default_rng(0).integers(3, 97, size=(4, 24)).astype(np.int32)
        from spkv_nas.data.blocks import DocumentInfo

        blocks = TokenBlocks(text, np.zeros((4, 24), np.int32), (DocumentInfo("0", "all", "0"),))
        density = probe(model, blocks, 0.5).density
        fixed = np.array([[np.nan, 1], [0, 0], [1, 1], [np.nan, 0]])
        assert np.array_equal(density[~np.isnan(fixed)], fixed[~np.isnan(fixed)])
        assert ((density[np.isnan(fixed)] > 0) & (density[np.isnan(fixed)] < 1)).all()

    def test_round_trip(
        self, model: PreTrainedModel, tokens: Tensor, tmp_path: Path, tiny_tokenizer: object
    ) -> None:
        set_gate_mode(model, "hard")
        save(model, tiny_tokenizer, tmp_path)  # type: ignore[arg-type]
        restored, _ = load(tmp_path)
        set_gate_mode(restored, "hard")
        assert equal_up_to_rounding(logits(restored, tokens), logits(model, tokens))

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (["SSS"] * 4, "is for 4 layers x 3 KV heads, the model has 4 layers x 2"),
            (["SS"], "is for 1 layers"),
        ],
    )
    def test_another_grid(self, rows: list[str], message: str) -> None:
        model = tiny_model()
        with pytest.raises(UserError, match=message):
            attach_gates(model, GateConfig(window=6, heads=rows))
        assert not predictors(model)
        assert model.config._attn_implementation == "sdpa"

    @pytest.mark.parametrize(
        ("rows", "message"), [(["SX"], "letters S, G and L; found SX"), (["GL"], "no head has")]
    )
    def test_other_letters(self, rows: list[str], message: str) -> None:
        with pytest.raises(ValidationError, match=message):
            GateConfig(heads=rows)


class TestPrice:
    def test_its_gradient_is_that_of_the_loss(self) -> None:
        one = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
        two = one.detach().clone().requires_grad_()
        is_text = torch.tensor([[True, False, True, True, True], [True, True, False, False, False]])
        (priced(one, 0.7, is_text) ** 2).sum().backward()
        ((two**2).sum() + 0.7 * torch.sigmoid(two.transpose(1, 2)[is_text]).mean()).backward()
        assert torch.allclose(one.grad, two.grad)

    def test_a_model_sums_over_its_layers(self, tokens: Tensor) -> None:
        gradients = []
        for price in (0.0, 2.0):
            model = gated(init_scale=0.0, bias=0.0)
            set_price(model, price)
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            gradients.append(torch.stack([m.down.bias.grad for m in predictors(model).values()]))
        # u = 1/2 everywhere: d(2 mean u)/d bias of one head of the eight is 2 * 1/4 / 8
        assert torch.allclose(gradients[1] - gradients[0], torch.tensor(2 / 4 / 8), atol=1e-6)
