"""Price of a key: the weight of the mean utility in the loss, adjusted so that gates keep a target share of the keys.

    loss = NLL + price * mean(u)

This is the SP-KV paper's density regulariser (appendix "Controlling sparsity at train time") with price = -lambda_aux.
Without a price a gate opens for every key that helps at all; with one, a key is kept only if the loss that it saves
exceeds the price. The first price is the quantile of the heads' benefits, which the gradient of a step estimates; a PI
controller continues on a logarithmic scale, with gains that grow as the learning rate decays (reports/LOG.md).
"""

import math
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from spkv_nas.model import attention, gates

PROPORTIONAL, INTEGRAL = 6.0, 0.15  # gains per unit of density; the latter also per step
_MIN_RATE = 0.1  # share of the largest learning rate below which the gains stop growing
_MAX_PROPORTIONAL = 1.0  # limit of the proportional term: gates that start alike respond late and all at once
_MAX_EXPONENT = 4.0  # limit of the exponent: a price of e^4 times the first
_MIN_SHARE = 0.1  # minimum first price, as a share of the mean absolute benefit


class Price:
    """Controller of the price of keys, which sets each step's price from the densities of the steps before."""

    def __init__(self, target: float) -> None:
        """Start at price 0 with a ``target`` density."""
        self.target = target  # share of the keys to keep, in [0, 1]
        self.value = 0.0  # price of the next step; 0 in the first step, which measures benefits
        self._first = self._sum = self._largest_rate = 0.0

    @property
    def is_measured(self) -> bool:
        """Return whether benefits have been measured, which set the first price."""
        return self._first > 0.0

    def begin(self, benefits: NDArray[np.float64]) -> None:
        """Set the first price from the benefits of heads [layers, KV heads]; NaN for heads without a gate."""
        gated = benefits[np.isfinite(benefits)]
        quantile = float(np.quantile(gated, 1.0 - self.target)) if gated.size else 0.0
        least = _MIN_SHARE * float(np.abs(gated).mean()) if gated.size else 0.0
        self._first = max(quantile, least, float(np.finfo(np.float32).tiny))

    def move(self, density: float, learning_rate: float) -> None:
        """Update the price after a step of mean density ``density``, taken at ``learning_rate``."""
        self._largest_rate = max(self._largest_rate, learning_rate)
        response = max(_MIN_RATE, learning_rate / self._largest_rate)
        error = (density - self.target) / response
        self._sum = min(self._sum + INTEGRAL * error, _MAX_EXPONENT)
        proportional = max(-_MAX_PROPORTIONAL, min(PROPORTIONAL * error, _MAX_PROPORTIONAL))
        exponent = min(self._sum + proportional, _MAX_EXPONENT)
        # Exponential above the first price, linear below, so that negative prices can raise the density
        self.value = self._first * (math.exp(exponent) if exponent > 0.0 else 1.0 + exponent)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "first": self._first, "sum": self._sum, "largest_rate": self._largest_rate}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the state that ``state`` returned."""
        self.value, self._first, self._sum = state["value"], state["first"], state["sum"]
        self._largest_rate = state["largest_rate"]


class KeyBenefitEstimator:
    """Estimate what a key saves, by KV head, from the gradient of the next steps: -d NLL / d u, in units of the price.

    It is the mean over keys with a gate, times the number of gates, so that a key whose benefit equals the price
    neither gains nor loses. Sink tokens have no gate. Gates must be soft, with price 0.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Start recording the gradients of the utility logits of ``model``."""
        heads = [len(predictor.row) for predictor in gates.predictors(model).values()]
        self._grid, self._num_gates = (len(heads), max(heads)), sum(heads)
        self._watch = attention.watch_logits(model, self._see)
        self._benefits: dict[int, torch.Tensor] = {}  # layer -> [Hkv], on the device

    def _see(self, layer: int, logits: torch.Tensor, is_text: torch.Tensor) -> None:
        """Register a hook on the gradient of the utility logits [B, Hkv, T] of a layer."""
        if logits.requires_grad:
            logits.register_hook(partial(self._add, layer, logits.detach(), is_text))  # type: ignore[no-untyped-call]

    def _add(self, layer: int, logits: torch.Tensor, is_text: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the benefits of a backward pass, from logits and their gradient [B, Hkv, T], over text [B, T]."""
        slope = torch.sigmoid(logits) * torch.sigmoid(-logits)  # du / dlogit; 0 without a gate
        has_gate = (slope > 0.0) & is_text[:, None]  # not in global and local heads, and not for sink tokens
        num_keys, num_gated = is_text.sum(), has_gate.sum((0, 2))
        sums = -(gradient / slope).where(has_gate, 0.0).sum((0, 2))
        scale = torch.where(num_keys > 0, num_keys / num_gated, 0.0)  # NaN without any gate, 0 without text
        benefit = sums * scale * self._num_gates
        self._benefits[layer] = self._benefits.get(layer, torch.zeros_like(benefit)) + benefit

    def stop(self) -> NDArray[np.float64]:
        """Stop recording; return benefits [gated layers, KV heads], NaN without a gate, 0 if nothing was recorded."""
        self._watch.close()
        benefits = [self._benefits[layer].cpu() for layer in sorted(self._benefits)]
        if not benefits:
            return np.zeros(self._grid)
        return pad_sequence(benefits, batch_first=True, padding_value=math.nan).double().numpy()
