"""The density that a model's gates reach while it runs, whoever runs it: training, or an evaluation.

Of all processes of torchrun together. A layout's is known without a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spkv_nas.base.distributed import sum_over_processes
from spkv_nas.base.errors import UserError
from spkv_nas.model.attention import GLOBAL_WINDOW, layer_states
from spkv_nas.model.gates import keeps
from spkv_nas.model.hooks import not_finite, watch_logits
from spkv_nas.model.modes import gate_settings


class _Seen(NamedTuple):
    """What was counted of a layer: tokens kept and utilities that were NaN, int64 [2, Hkv], left on the device."""

    kept_and_wrong: Tensor
    num_tokens: int

    def and_(self, other: _Seen) -> _Seen:
        return _Seen(self.kept_and_wrong + other.kept_and_wrong, self.num_tokens + other.num_tokens)


class DensityTracker:
    """Density of every KV head (share of tokens with ``u >= tau``) between ``start`` and ``stop``.

    Layers that gates pass by, local by design, do not count: all gates open is a density of 1.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._watch = ExitStack()
        self._started = False
        self._tau = 0.0
        self._seen: dict[int, _Seen] = {}  # by layer
        self._real: tuple[Tensor, int] | None = None

    def only(self, real: Tensor | None) -> None:
        """Count from now on the tokens of a pass that ``real``, bool [B, T], says; None: all of them.

        The others are padding, or follow the end of what a row had to say.
        """
        self._real = None if real is None else (real, int(real.sum()))

    def start(self) -> None:
        """Count from now on, at the threshold that the gates have now."""
        self.close()
        self._started, self._seen = True, {}
        self._tau = gate_settings(self._model).tau
        self._watch = watch_logits(self._model, self._count)

    def _count(self, layer: int, logits: Tensor) -> None:
        logits = logits.detach()
        both = torch.stack([keeps(logits, self._tau), logits.isnan()])
        number = logits.shape[0] * logits.shape[2]
        if self._real is not None:
            real, number = self._real
            both &= real[:, None].to(logits.device)
        own = _Seen(both.sum((1, 3)), number)
        self._seen[layer] = own if layer not in self._seen else self._seen[layer].and_(own)

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """What a pass inside the ``with`` block that fails has counted until then is forgotten."""
        before = dict(self._seen)
        try:
            yield
        except Exception:
            self._seen = before
            raise

    def close(self) -> None:
        """Count no more."""
        self._watch.close()

    def stop(self, *, alone: bool = False) -> NDArray[np.float64] | None:
        """Count no more; densities [layers, KV heads], NaN where gates pass by, or None if no gate ran.

        Collective, once it was started, unless it is what this process ``alone`` has counted.

        Raises:
            UserError: a utility was NaN, which no gate keeps: the density would look like 0.
        """
        if not self._started:
            return None
        self.close()
        states = layer_states(self._model)
        grid = len(states), states[0].num_kv_heads
        counts = np.zeros((3, *grid), dtype=np.int64)  # kept, utilities that were NaN, tokens
        for layer, seen in self._seen.items():
            counts[:2, layer] = seen.kept_and_wrong.cpu().numpy()
            counts[2, layer] = seen.num_tokens
        self._started = False
        kept, wrong, tokens = counts if alone else sum_over_processes(counts)
        if not tokens.any():
            return None
        if wrong.any():
            first = tuple(np.argwhere(wrong)[0].tolist())
            raise UserError(not_finite("the utility", int((wrong > 0).sum()), int((tokens > 0).sum()), first))
        return np.where(tokens > 0, kept / np.maximum(tokens, 1), np.nan)


def layout_density(model: nn.Module) -> float:
    """Share of a model's heads that are global by its layout; NaN if it has none."""
    windows = [window for state in layer_states(model) for window in state.windows or ()]
    return sum(window >= GLOBAL_WINDOW for window in windows) / len(windows) if windows else float("nan")
