"""Measure the density of a model's gates while it runs, over all ranks; a layout's is known without a pass."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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
        states = torch.stack(
            [gates.keeps(logits, self._tau), logits.isnan(), torch.ones_like(logits, dtype=torch.bool)]
        )
        # Leave out padding and filling
        states &= (is_text if self._real is None else self._real)[:, None].to(logits.device)
        counts = states.sum((1, 3))
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
