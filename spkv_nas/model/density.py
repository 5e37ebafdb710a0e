"""The density that a model's gates reach while it runs, whoever runs it: training, or an evaluation.

Of all processes of torchrun together.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spkv_nas.base.distributed import sum_over_processes
from spkv_nas.base.errors import UserError
from spkv_nas.model.attention import layer_states
from spkv_nas.model.gates import keeps
from spkv_nas.model.modes import gate_settings
from spkv_nas.model.watch import not_finite, watch_logits


class DensityWatch:
    """Density of every KV head (share of tokens with ``u >= tau``) between ``start`` and ``stop``.

    Layers that gates pass by, local by design, do not count: all gates open is a density of 1.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._watch = ExitStack()
        self._started = False
        self._tau = 0.0
        self._kept: dict[int, list[Tensor]] = {}  # by layer: counts of each forward pass [Hkv], left on the device
        self._num_tokens: dict[int, int] = {}  # by layer
        self._wrong: dict[int, Tensor] = {}  # by layer: whether a utility was NaN, bool [Hkv], left on the device

    def start(self) -> None:
        """Count from now on, at the threshold that the gates have now."""
        self.close()
        self._started, self._kept, self._num_tokens, self._wrong = True, {}, {}, {}
        self._tau = gate_settings(self._model).tau
        self._watch = watch_logits(self._model, self._count)

    def _count(self, layer: int, logits: Tensor) -> None:
        self._kept.setdefault(layer, []).append(keeps(logits.detach(), self._tau).sum((0, 2)))
        wrong = logits.detach().isnan().any(2).any(0)
        self._wrong[layer] = wrong | self._wrong[layer] if layer in self._wrong else wrong
        self._num_tokens[layer] = self._num_tokens.get(layer, 0) + logits.shape[0] * logits.shape[2]

    def close(self) -> None:
        """Count no more."""
        self._watch.close()

    def stop(self) -> NDArray[np.float64] | None:
        """Count no more; densities [layers, KV heads], NaN where gates pass by, or None if no gate ran.

        Collective, once it was started.

        Raises:
            UserError: a utility was NaN, which no gate keeps: the density would look like 0.
        """
        if not self._started:
            return None
        self.close()
        states = layer_states(self._model)
        grid = len(states), states[0].num_kv_heads
        counts = np.zeros((3, *grid), dtype=np.int64)  # kept, whether a utility was NaN, tokens
        for layer, kept in self._kept.items():
            both = torch.stack([torch.stack(kept).sum(0), self._wrong[layer]])
            counts[:2, layer] = both.cpu().numpy()
            counts[2, layer] = self._num_tokens[layer]
        self._started = False
        kept, wrong, tokens = sum_over_processes(counts)
        if not tokens.any():
            return None
        if wrong.any():
            first = tuple(np.argwhere(wrong)[0].tolist())
            raise UserError(not_finite("the utility", int((wrong > 0).sum()), int((tokens > 0).sum()), first))
        return np.where(tokens > 0, kept / np.maximum(tokens, 1), np.nan)
