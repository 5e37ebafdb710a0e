"""Measure the density of a model's gates while it runs, over all ranks, and steer it by the price of keys.

    loss = NLL + price * mean(u)

This is the SP-KV paper's density regulariser (appendix "Controlling sparsity at train time") with price = -lambda_aux.
Without a price a gate opens for every key that helps at all; with one, a key is kept only if the loss that it saves
exceeds the price. The first price is the quantile of the heads' benefits, which the gradient of a step estimates; a PI
controller continues on a logarithmic scale, with gains that grow as the learning rate decays (reports/LOG.md).
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from spkv_nas.base.distributed import sum_over_processes
from spkv_nas.base.errors import UserError, not_finite
from spkv_nas.model import attention, gates, modes

# Of the price of keys
PROPORTIONAL = 6.0  # gain per unit of density
INTEGRAL = 0.15  # gain per unit of density and step
_MIN_RATE = 0.1  # share of the largest learning rate below which the gains stop growing
# Limit of the proportional term: gates that start alike respond late and all at once
_MAX_PROPORTIONAL = 1.0
_MAX_EXPONENT = 4.0  # limit of the exponent: a price of e^4 times the first
_MIN_SHARE = 0.1  # minimum first price, as a share of the mean absolute benefit


class DensityTracker:
    """Measure the density of every KV head, the share of tokens with ``u >= tau``, from ``start`` to ``stop``.

    Padding, filling and layers with a native sliding window do not count: if all gates are open the density is 1.
    """

    def __init__(self, model: torch.nn.Module, *, only_learning: bool = False) -> None:
        """Create a tracker for ``model``, which counts after ``start``; ``only_learning``: passes with gradients."""
        self._model = model
        self._only_learning = only_learning
        self._watch = ExitStack()
        self._started = False
        self._tau = 0.0
        # Kept tokens, NaN utilities and tokens of heads, int64 [3, layers, Hkv], on the device; None before any
        self._counts: torch.Tensor | None = None
        self._real: torch.Tensor | None = None

    def only(self, real: torch.Tensor | None) -> None:
        """Count only some tokens of the following passes: those that ``real``, bool [B, T], marks; None: all text.

        The others are padding, or come after a row's EOS token.
        """
        self._real = real

    def start(self) -> None:
        """Start counting, at the current threshold of the gates."""
        self.close()
        self._started = True
        self._counts = None
        self._tau = modes.gate_settings(self._model).tau
        self._watch = attention.watch_logits(self._model, self._count)

    def _count(self, layer: int, logits: torch.Tensor, is_text: torch.Tensor) -> None:
        """Count kept tokens and NaN utilities in the logits [B, Hkv, T] of a layer."""
        # Leave out a teacher's pass through the same layers
        if self._only_learning and not torch.is_grad_enabled():
            return
        logits = logits.detach()
        is_kept = gates.keeps(logits, self._tau)
        is_wrong = logits.isnan()
        flags = torch.stack([is_kept, is_wrong, torch.ones_like(is_wrong)])
        # Leave out padding and filling
        is_counted = is_text if self._real is None else self._real
        flags &= is_counted[:, None].to(logits.device)
        if self._counts is None:
            self._counts = self._zeros(logits.device)
        num_heads = logits.shape[1]
        self._counts[:, layer, :num_heads] += flags.sum((1, 3)).to(self._counts.device)

    def _zeros(self, device: torch.device | str) -> torch.Tensor:
        """Return counts of no token."""
        heads = attention.heads_per_layer(attention.layer_states(self._model))
        return torch.zeros(3, len(heads), max(heads), dtype=torch.int64, device=device)

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Discard the counts of a pass that fails inside the ``with`` block."""
        before = None if self._counts is None else self._counts.clone()
        try:
            yield
        except Exception:
            self._counts = before
            raise

    def close(self) -> None:
        """Stop counting and remove the hooks."""
        self._watch.close()

    def stop_counting(self, *, alone: bool = False) -> torch.Tensor | None:
        """Stop counting and return kept tokens, NaN utilities and tokens, int64 [3, layers, KV heads], on the device.

        None without a ``start``. Otherwise must be called on all ranks, unless ``alone``, which returns the counts of
        this process.
        """
        if not self._started:
            return None
        self.close()
        self._started = False
        counts = self._zeros("cpu") if self._counts is None else self._counts
        return counts if alone else sum_over_processes(counts)

    def stop(self, *, alone: bool = False) -> NDArray[np.float64] | None:
        """Stop as ``stop_counting``, and return ``head_densities``; None without a ``start``."""
        counts = self.stop_counting(alone=alone)
        return None if counts is None else head_densities(counts)


def head_densities(counts: torch.Tensor) -> NDArray[np.float64] | None:
    """Read counts of ``DensityTracker`` as densities [layers, KV heads]: NaN for heads without gates; None without any.

    Raises ``UserError``: a utility was NaN, which no gate keeps: the density would look like 0.
    """
    kept, wrong, tokens = counts.cpu().numpy()
    if not tokens.any():
        return None
    has_gate = tokens > 0
    if wrong.any():
        first = tuple(np.argwhere(wrong)[0].tolist())
        num_wrong = int((wrong > 0).sum())
        raise UserError(not_finite("the utility", num_wrong, int(has_gate.sum()), first))
    return np.where(has_gate, kept / np.maximum(tokens, 1), np.nan)


def mean_density(counts: torch.Tensor) -> torch.Tensor:
    """Compute the mean density of heads with gates, float64, on the device; NaN if a utility was, or without gates."""
    kept, wrong, tokens = counts.double()
    mean: torch.Tensor = (kept / tokens).nanmean().masked_fill(wrong.any(), math.nan)
    return mean


def layout_density(model: torch.nn.Module) -> float:
    """Compute the share of a model's heads that its layout makes global; NaN if it has no layout."""
    is_global = [
        window == state.checkpoint_window and not state.is_always_local
        for state in attention.layer_states(model)
        for window in state.windows or ()
    ]
    return sum(is_global) / len(is_global) if is_global else float("nan")


class Price:
    """Controller of the price of keys, which sets each step's price from the densities of the steps before.

    It computes on the device: the host waits where the first price is set and where ``state`` is read.
    """

    def __init__(self, target: float) -> None:
        """Start at price 0 with a ``target`` density."""
        self.target = target  # share of the keys to keep, in [0, 1]
        # Price of the next step, float64 on the device; 0 in the first step, which measures benefits
        self.value: torch.Tensor | float = 0.0
        # Price that the benefits set, above 0 as soon as they are measured
        self.first = 0.0
        self._sum: torch.Tensor | float = 0.0  # integral term of the exponent
        self._largest_rate = 0.0

    def begin(self, benefits: NDArray[np.float64]) -> None:
        """Set the first price from the benefits of heads [layers, KV heads]; NaN for heads without a gate."""
        self.first = float(np.finfo(np.float32).tiny)
        gated = benefits[np.isfinite(benefits)]
        if gated.size:
            quantile = float(np.quantile(gated, 1.0 - self.target))
            mean_size = float(np.abs(gated).mean())
            self.first = max(self.first, quantile, _MIN_SHARE * mean_size)

    def move(self, density: torch.Tensor, learning_rate: float) -> None:
        """Update the price after a step of mean density ``density``, float64, taken at ``learning_rate``."""
        self._largest_rate = max(self._largest_rate, learning_rate)
        response = max(_MIN_RATE, learning_rate / self._largest_rate)
        error = (density - self.target) / response
        integral = self._sum + INTEGRAL * error
        self._sum = integral.clamp(max=_MAX_EXPONENT)
        proportional = PROPORTIONAL * error
        proportional = proportional.clamp(-_MAX_PROPORTIONAL, _MAX_PROPORTIONAL)
        exponent = self._sum + proportional
        exponent = exponent.clamp(max=_MAX_EXPONENT)
        # Exponential above the first price, linear below, so that negative prices can raise the density
        factor = exponent.exp().where(exponent > 0.0, 1.0 + exponent)
        self.value = self.first * factor

    def state(self) -> dict[str, float]:
        """Read the state for a checkpoint."""
        numbers = {
            "value": self.value,
            "first": self.first,
            "sum": self._sum,
            "largest_rate": self._largest_rate,
        }
        return {name: float(number) for name, number in numbers.items()}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the state that ``state`` returned."""
        self.value = state["value"]
        self.first = state["first"]
        self._sum = state["sum"]
        self._largest_rate = state["largest_rate"]


class KeyBenefitEstimator:
    """Estimate what a key saves, by KV head, from the gradient of the next steps: -d NLL / d u, in units of the price.

    It is the mean over keys with a gate, times the number of gates, so that a key whose benefit equals the price
    neither gains nor loses. Sink tokens have no gate. Gates must be soft, with price 0.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Start recording the gradients of the utility logits of ``model``."""
        heads = [len(predictor.row) for predictor in gates.predictors(model).values()]
        self._grid = (len(heads), max(heads))
        self._num_gates = sum(heads)
        self._watch = attention.watch_logits(model, self._see)
        self._benefits: dict[int, torch.Tensor] = {}  # layer -> [Hkv], on the device

    def _see(self, layer: int, logits: torch.Tensor, is_text: torch.Tensor) -> None:
        """Register a hook on the gradient of the utility logits [B, Hkv, T] of a layer."""
        if logits.requires_grad:
            logits.register_hook(partial(self._add, layer, logits.detach(), is_text))  # type: ignore[no-untyped-call]

    def _add(
        self, layer: int, logits: torch.Tensor, is_text: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        """Add the benefits of a backward pass, from logits and their gradient [B, Hkv, T], over text [B, T]."""
        slope = torch.sigmoid(logits) * torch.sigmoid(-logits)  # du / dlogit; 0 without a gate
        # Keys of global and local heads have no gate, and neither have sink tokens
        has_gate = (slope > 0.0) & is_text[:, None]
        num_keys = is_text.sum()
        num_gated = has_gate.sum((0, 2))
        by_utility = (gradient / slope).where(has_gate, 0.0)
        sums = -by_utility.sum((0, 2))
        # NaN without any gate, 0 without text
        scale = torch.where(num_keys > 0, num_keys / num_gated, 0.0)
        benefit = sums * scale * self._num_gates
        before = self._benefits.get(layer, torch.zeros_like(benefit))
        self._benefits[layer] = before + benefit

    def stop(self) -> NDArray[np.float64]:
        """Stop recording; return benefits [gated layers, KV heads], NaN without a gate, 0 if nothing was recorded."""
        self._watch.close()
        benefits = [self._benefits[layer].cpu() for layer in sorted(self._benefits)]
        if not benefits:
            return np.zeros(self._grid)
        grid = pad_sequence(benefits, batch_first=True, padding_value=math.nan)
        return grid.double().numpy()
