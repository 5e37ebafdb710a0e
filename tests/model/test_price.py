"""Test the price of keys: its initial value, its updates, and its keys in recipes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import tiny_model
from torch import Tensor, tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.density_tracker import KeyBenefitEstimator, Price
from spkv_nas.model.gates import predictors
from spkv_nas.model.modes import set_gate_mode, set_price
from spkv_nas.training.branch_config import GatesConfig

RATE = 1e-3  # learning rate where it does not matter


def gated(**options: Any) -> PreTrainedModel:
    model = tiny_model()
    attach_gates(model, GateConfig(window=2, hidden_size=8, **options), seed=0)
    return model


class TestBenefits:
    @pytest.mark.parametrize("sinks", [0, 3])
    def test_a_price_of_the_benefit_stops_a_gate(self, tokens: Tensor, sinks: int) -> None:
        """A price equal to a head's benefit gives its bias a gradient of zero, also with keys that have no gate."""
        model = gated(init_scale=0.0, bias=0.3, sinks=sinks)
        set_gate_mode(model, "soft")
        watch = KeyBenefitEstimator(model)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        benefits = watch.stop()
        assert benefits.shape == (4, 2)
        for layer, predictor in enumerate(predictors(model).values()):
            for head in range(2):
                model.zero_grad()
                set_price(model, float(benefits[layer, head]))
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                gradients = predictor.down.bias.grad
                assert abs(float(gradients[head])) < 1e-6 < float(gradients.abs().max())

    def test_accumulated_steps_add_up(self, tokens: Tensor) -> None:
        model = gated(init_scale=0.0, bias=0.3)
        set_gate_mode(model, "soft")
        result = []
        for parts in ([tokens], list(tokens.split(1))):
            watch = KeyBenefitEstimator(model)
            for part in parts:
                (model(input_ids=part, labels=part, use_cache=False).loss / len(parts)).backward()
            result.append(watch.stop())
        assert np.allclose(*result, rtol=1e-4)

    def test_heads_without_a_gate_have_none(self, tokens: Tensor) -> None:
        model = gated(heads=["SG", "SL", "SS", "LG"])
        watch = KeyBenefitEstimator(model)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        benefits = watch.stop()
        assert np.isfinite(benefits).tolist() == [[True, False], [True, False], [True, True]]
        price = Price(0.5)
        price.begin(benefits)
        assert price.first > 0


class TestPrice:
    def test_the_first_is_the_benefit_of_the_marginal_head(self) -> None:
        price = Price(0.25)
        price.begin(np.arange(1.0, 6.0).reshape(1, 5))
        price.move(tensor(0.25), RATE)
        assert price.value == pytest.approx(4.0)

    def test_no_benefit_still_has_a_price(self) -> None:
        price = Price(0.25)
        price.begin(np.full((2, 2), -1.0))
        price.move(tensor(1.0), RATE)
        assert price.value > 0

    def test_the_price_rises_with_the_density_and_can_become_negative(self) -> None:
        price = Price(0.5)
        price.begin(np.ones((2, 2)))
        values = []
        for density in (1.0, 1.0, 0.5, 0.0):
            price.move(tensor(density), RATE)
            values.append(price.value)
        assert values[0] < values[1] > values[2] > values[3] > -1
        for _ in range(40):
            price.move(tensor(0.0), RATE)
        assert price.value < 0

    @pytest.mark.parametrize(("final_rate", "drift"), [(1.0, 0.0), (0.01, 0.001)])
    def test_the_price_settles_where_gates_respond_slowly(
        self, final_rate: float, drift: float
    ) -> None:
        """The share of keys falls with the logarithm of the price, drifts, and follows the learning rate."""
        for target in (0.1, 0.286, 0.5):
            price, density = Price(target), 0.5
            price.begin(np.full((1, 1), 0.05))
            seen = []
            for step in range(160):
                rate = final_rate + (1 - final_rate) * (1 + math.cos(math.pi * step / 160)) / 2
                price.move(tensor(density), rate * RATE)
                settled = (
                    1 / (1 + math.exp(1.5 * math.log(max(price.value, 1e-6) / 0.03))) - step * drift
                )
                density += 0.1 * rate * (settled - density)
                seen.append(density)
            assert abs(seen[-1] - target) < 0.01
            assert max(abs(value - target) for value in seen[32:]) < 0.15

    def test_the_price_resumes_from_its_state(self) -> None:
        one, other = Price(0.3), Price(0.3)
        one.begin(np.ones((2, 2)))
        one.move(tensor(0.7), RATE)
        other.restore(one.state())
        one.move(tensor(0.6), RATE)
        other.move(tensor(0.6), RATE)
        assert one.value == other.value


class TestRecipe:
    @pytest.mark.parametrize(
        ("gates", "expected"),
        [
            ({}, 5.0),
            ({"target_density": 0.3}, 0.0),
            ({"price": 0.02, "tau": 0.3}, math.log(0.3 / 0.7)),
            ({"price": 0.02, "bias": 1.0}, 1.0),
        ],
    )
    def test_priced_gates_start_at_the_threshold(
        self, gates: dict[str, Any], expected: float
    ) -> None:
        assert GatesConfig.model_validate(gates).bias == pytest.approx(expected)

    def test_price_and_target_exclude_each_other(self) -> None:
        with pytest.raises(ValueError, match="set only one of 'price' and 'target_density'"):
            GatesConfig.model_validate({"price": 0.5, "target_density": 0.3})
