"""The density that a model's gates reach while it runs, whoever runs it: training, or an evaluation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from spkv_nas.model.gates import threshold_logit
from spkv_nas.model.hook import attention_layers, layer_predictor, layer_state


class DensityWatch:
    """Mean density of the gated heads (share of tokens with ``u >= tau``) between ``start`` and ``stop``.

    Layers without gates, local by design, do not count: all gates open is a density of 1.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._kept: list[Tensor] = []  # one count per forward pass and layer, left on the device
        self._seen = 0

    def start(self) -> None:
        """Count from now on, at the thresholds that the gates have now."""
        self.stop()
        for layer in attention_layers(self._model).values():
            predictor = layer_predictor(layer)
            if predictor is not None:
                limit = threshold_logit(layer_state(layer).tau)
                self._handles.append(predictor.register_forward_hook(self._counter(limit)))

    def _counter(self, limit: float) -> Any:
        def count(_module: nn.Module, _args: Any, logits: Tensor) -> None:
            self._kept.append((logits.detach() >= limit).sum())
            self._seen += logits.numel()

        return count

    def stop(self) -> float:
        """Remove the hooks; the mean density seen, or NaN if no gate ran."""
        for handle in self._handles:
            handle.remove()
        density = float(torch.stack(self._kept).sum()) / self._seen if self._kept else math.nan
        self._handles, self._kept, self._seen = [], [], 0
        return density
