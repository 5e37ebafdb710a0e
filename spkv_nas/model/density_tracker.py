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


class DensityTracker:
    """Measure the density of every KV head, the share of tokens with ``u >= tau``, from ``start`` to ``stop``.

    Padding, filling and layers with a native sliding window do not count: if all gates are open the density is 1.
    """

    def __init__(self, model: torch.nn.Module, *, only_learning: bool = False) -> None:
        """Create a tracker for ``model``, which counts after ``start``; ``only_learning``: passes with gradients."""
        self._model, self._only_learning = model, only_learning
        self._watch = ExitStack()
        self._started = False
        self._tau = 0.0
        # layer -> kept tokens, NaN utilities and tokens of its heads, int64 [3, Hkv], on the device
        self._seen: dict[int, torch.Tensor] = {}
        self._real: torch.Tensor | None = None

    def only(self, real: torch.Tensor | None) -> None:
        """Count only some tokens of the following passes: those that ``real``, bool [B, T], marks; None: all text.

        The others are padding, or come after a row's EOS token.
        """
        self._real = real

    def start(self) -> None:
        """Start counting, at the current threshold of the gates."""
        self.close()
        self._started, self._seen = True, {}
        self._tau = modes.gate_settings(self._model).tau
        self._watch = attention.watch_logits(self._model, self._count)

    def _count(self, layer: int, logits: torch.Tensor, is_text: torch.Tensor) -> None:
        """Count kept tokens and NaN utilities in the logits [B, Hkv, T] of a layer."""
        if self._only_learning and not torch.is_grad_enabled():  # a teacher's pass through the same layers
            return
        logits = logits.detach()
        is_wrong = logits.isnan()
        flags = torch.stack([gates.keeps(logits, self._tau), is_wrong, torch.ones_like(is_wrong)])
        # Leave out padding and filling
        flags &= (is_text if self._real is None else self._real)[:, None].to(logits.device)
        counts = flags.sum((1, 3))
        self._seen[layer] = counts if layer not in self._seen else self._seen[layer] + counts

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Discard the counts of a pass that fails inside the ``with`` block."""
        before = dict(self._seen)
        try:
            yield
        except Exception:
            self._seen = before
            raise

    def close(self) -> None:
        """Stop counting and remove the hooks."""
        self._watch.close()

    def stop(self, *, alone: bool = False) -> NDArray[np.float64] | None:
        """Stop counting and return densities [layers, KV heads]: NaN for layers without gates; None if no gate ran.

        Must be called on all ranks if counting was started, unless ``alone``, which returns the counts of this process.
        Raises ``UserError``: a utility was NaN, which no gate keeps: the density would look like 0.
        """
        if not self._started:
            return None
        self.close()
        # Collect counts [3, layers, KV heads], with one read from the device, as this may be in every step
        states = attention.layer_states(self._model)
        grid = len(states), max(attention.heads_per_layer(states))
        counts = np.zeros((3, *grid), dtype=np.int64)  # kept tokens, NaN utilities, tokens
        if self._seen:
            device = next(iter(self._seen.values())).device
            seen = pad_sequence([layer.T.to(device) for layer in self._seen.values()], batch_first=True)
            counts[:, list(self._seen), : seen.shape[1]] = seen.cpu().numpy().transpose(2, 0, 1)
        # Sum them over ranks, and check
        self._started = False
        kept, wrong, tokens = counts if alone else sum_over_processes(counts)
        if not tokens.any():
            return None
        if wrong.any():
            first = tuple(np.argwhere(wrong)[0].tolist())
            raise UserError(not_finite("the utility", int((wrong > 0).sum()), int((tokens > 0).sum()), first))
        return np.where(tokens > 0, kept / np.maximum(tokens, 1), np.nan)


def layout_density(model: torch.nn.Module) -> float:
    """Compute the share of a model's heads that its layout makes global; NaN if it has no layout."""
    is_global = [
        window == state.checkpoint_window and not state.is_always_local
        for state in attention.layer_states(model)
        for window in state.windows or ()
    ]
    return sum(is_global) / len(is_global) if is_global else float("nan")


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
