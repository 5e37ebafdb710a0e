"""The price of a key: the weight of the mean utility in the loss, moved so that gates keep a target share of the keys.

    loss = NLL + price * mean(u)

This is the SP-KV paper's density regulariser (appendix "Controlling sparsity at train time", "Regularization") with
price = -lambda_aux. Without a price a gate opens for every key that helps at all, and Adam moves it as fast for a key
that helps a little as for one that the model lives by: density then counts keys. At a price a key stays only if what it
saves, its benefit, is more: density then tells need (reports/LOG.md).

The price that keeps a share of the keys is near the benefit of a key in the head at that quantile, which the gradient
of one step tells (``KeyBenefitEstimator``). From there a controller goes on, on a scale of ratios, so that it settles
alike in models in which benefits differ a hundredfold. As the learning rate decays gates answer ever less to a price,
and the controller moves it ever more, so that a density that drifts away in the end is still caught (reports/LOG.md).
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spkv_nas.model.attention import layer_states
from spkv_nas.model.gates import predictors
from spkv_nas.model.hooks import watch_logits

PROPORTIONAL, INTEGRAL = 6.0, 0.15  # of the controller, per unit of density and, of the second, per step
_LEAST_RATE = 0.1  # share of the largest learning rate from which on gains grow no more
_MOST_PROPORTIONAL = 1.0  # of its first part: gates that start together answer late, and all at once
_MOST = 4.0  # of all of it: a price of e^4 times the first
_LEAST_SHARE = 0.1  # of the mean benefit in size, the least first price


class Price:
    """The price of each step, from the densities of the steps before.

    Attributes:
        target: share of the keys to keep, in [0, 1].
        value: of the next step; 0 in the first, in which benefits are measured.
    """

    def __init__(self, target: float) -> None:
        self.target = target
        self.value = 0.0
        self._first = self._sum = self._largest_rate = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether the first price is known."""
        return self._first > 0.0

    def begin(self, benefits: NDArray[np.float64]) -> None:
        """Take the first price from the benefits of heads [layers, KV heads]; NaN for heads without a gate."""
        known = benefits[np.isfinite(benefits)]
        quantile = float(np.quantile(known, 1.0 - self.target)) if known.size else 0.0
        least = _LEAST_SHARE * float(np.abs(known).mean()) if known.size else 0.0
        self._first = max(quantile, least, float(np.finfo(np.float32).tiny))

    def move(self, density: float, learning_rate: float) -> None:
        """Go on to the next step's price after a step of mean density ``density``, taken at ``learning_rate``."""
        self._largest_rate = max(self._largest_rate, learning_rate)
        answer = max(_LEAST_RATE, learning_rate / self._largest_rate)
        error = (density - self.target) / answer
        self._sum = min(self._sum + INTEGRAL * error, _MOST)
        now = max(-_MOST_PROPORTIONAL, min(PROPORTIONAL * error, _MOST_PROPORTIONAL))
        exponent = min(self._sum + now, _MOST)
        # a ratio upward; downward linear, so that a density above what gates have by themselves is reached too
        self.value = self._first * (math.exp(exponent) if exponent > 0.0 else 1.0 + exponent)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of this."""
        return {"value": self.value, "first": self._first, "sum": self._sum, "largest_rate": self._largest_rate}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what ``state`` gave."""
        self.value, self._first, self._sum = state["value"], state["first"], state["sum"]
        self._largest_rate = state["largest_rate"]


class KeyBenefitEstimator:
    """What a key saves, by KV head, from the gradient of the next steps: -d NLL / d u, in units of the price.

    The mean over keys, times the number of gates, so that a key whose benefit is the price neither gains nor loses.
    Gates must be soft, and their price 0.
    """

    def __init__(self, model: nn.Module) -> None:
        self._num_layers, self._num_heads = len(predictors(model)), layer_states(model)[0].num_kv_heads
        self._watch = watch_logits(model, self._see)
        self._benefits: dict[int, Tensor] = {}  # by layer: [Hkv], left on the device

    def _see(self, layer: int, logits: Tensor) -> None:
        if logits.requires_grad:
            logits.register_hook(partial(self._add, layer, logits.detach()))  # type: ignore[no-untyped-call]

    def _add(self, layer: int, logits: Tensor, gradient: Tensor) -> None:
        slope = torch.sigmoid(logits) * torch.sigmoid(-logits)  # du / dlogit; 0 where a head has no gate
        benefit = -(gradient / slope).sum((0, 2)) * logits.shape[1] * self._num_layers
        self._benefits[layer] = self._benefits.get(layer, torch.zeros_like(benefit)) + benefit

    def stop(self) -> NDArray[np.float64]:
        """Watch no more; benefits [layers with gates, KV heads], NaN of heads without a gate, 0 where none was seen."""
        self._watch.close()
        found = [self._benefits[layer].cpu() for layer in sorted(self._benefits)]
        return torch.stack(found).double().numpy() if found else np.zeros((self._num_layers, self._num_heads))
