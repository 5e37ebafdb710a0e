"""The density that a model's gates reach while it runs, whoever runs it: training, or an evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spkv_nas.model.gates import keeps
from spkv_nas.model.hook import attention_layers, layer_predictor, layer_state


class DensityWatch:
    """Density of every KV head (share of tokens with ``u >= tau``) between ``start`` and ``stop``.

    Layers that gates pass by, local by design, do not count: all gates open is a density of 1.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._kept: dict[int, list[Tensor]] = {}  # by layer: counts of each forward pass [Hkv], left on the device
        self._seen: dict[int, int] = {}  # by layer: tokens

    def start(self) -> None:
        """Count from now on, at the thresholds that the gates have now."""
        self.stop()
        for index, layer in enumerate(attention_layers(self._model).values()):
            predictor = layer_predictor(layer)
            if predictor is not None:
                self._handles.append(predictor.register_forward_hook(self._counter(index, layer_state(layer).tau)))

    def _counter(self, layer: int, tau: float) -> Any:
        def count(_module: nn.Module, _args: Any, logits: Tensor) -> None:
            kept = keeps(logits.detach(), tau).sum((0, 2))
            self._kept.setdefault(layer, []).append(kept)
            self._seen[layer] = self._seen.get(layer, 0) + logits.shape[0] * logits.shape[2]

        return count

    def stop(self) -> NDArray[np.float64] | None:
        """Remove the hooks; densities [layers, KV heads], NaN where gates pass by, or None if no gate ran."""
        for handle in self._handles:
            handle.remove()
        kept, seen, self._kept, self._seen, self._handles = self._kept, self._seen, {}, {}, []
        if not kept:
            return None
        layers = attention_layers(self._model)
        density = np.full((len(layers), len(next(iter(kept.values()))[0])), np.nan)
        for layer, counts in kept.items():
            density[layer] = torch.stack(counts).sum(0).cpu().numpy() / seen[layer]
        return density
