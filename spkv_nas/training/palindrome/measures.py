"""What a model makes of the palindrome task: NLL of the output, and what its gates keep."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from spkv_nas.artifacts.histogram import threshold_logit
from spkv_nas.model.gates import predictors
from spkv_nas.model.hooks import watch_logits
from spkv_nas.model.modes import gate_mode
from spkv_nas.training.palindrome.task import KINDS, Palindromes


@dataclass(frozen=True)
class Measures:
    """What a model makes of the task; the figures of its gates are None if it has none.

    Attributes:
        nll, hard_nll: nats per output token with soft gates, and with hard ones.
        mean_utility, density: means over heads and tokens, soft and hard.
        kept: the density by kind of token.
    """

    nll: float
    hard_nll: float | None = None
    mean_utility: float | None = None
    density: float | None = None
    kept: dict[str, float] | None = None


def take_measures(
    model: PreTrainedModel, sequences: Palindromes, tau: float = 0.5, *, batch_size: int = 64
) -> Measures:
    """What a model makes of ``sequences``; hard gates are those at ``tau``."""
    if not predictors(model):
        return Measures(output_nll(model, sequences, batch_size))
    watch = GateWatch(model, tau)
    watch.start()
    nll = output_nll(model, sequences, batch_size)
    soft = watch.stop()
    watch.start()
    with gate_mode(model, "hard", tau):
        hard_nll = output_nll(model, sequences, batch_size)
    hard = watch.stop()
    assert soft is not None
    assert hard is not None
    kinds = np.array(sequences.kinds)
    return Measures(
        nll=nll,
        hard_nll=hard_nll,
        mean_utility=float(soft[0].mean()),
        density=float(hard[1].mean()),
        kept={kind: float(hard[1][kinds == kind].mean()) for kind in KINDS},
    )


@torch.inference_mode()
def output_nll(model: PreTrainedModel, sequences: Palindromes, batch_size: int) -> float:
    """Nats per output token, in evaluation mode, with the gates as they are."""
    was_training = model.training
    model.eval()
    total = 0.0
    for start in range(0, len(sequences), batch_size):
        rows = [sequences[index] for index in range(start, min(start + batch_size, len(sequences)))]
        tokens = torch.stack([row["input_ids"] for row in rows]).to(model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[:, -sequences.num_outputs - 1 : -1]
        wanted = tokens[:, -sequences.num_outputs :].flatten()
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), wanted, reduction="sum"))
    model.train(was_training)
    return total / (len(sequences) * sequences.num_outputs)


class GateWatch:
    """Utility and keep (``u >= tau``) of all gates by position, between ``start`` and ``stop``."""

    def __init__(self, model: nn.Module, tau: float = 0.5) -> None:
        self._model = model
        self._limit = threshold_logit(tau)
        self._watch = ExitStack()
        self._sums: list[Tensor] = []  # [2, T] for each forward pass and layer
        self._seen = 0

    def start(self) -> None:
        """Watch from now on."""
        self.stop()
        self._watch = watch_logits(self._model, self._see)

    def _see(self, _layer: int, logits: Tensor) -> None:
        logits = logits.detach().flatten(0, 1)
        self._sums.append(torch.stack([torch.sigmoid(logits).sum(0), (logits >= self._limit).float().sum(0)]))
        self._seen += len(logits)

    def stop(self) -> NDArray[np.float64] | None:
        """Mean utility and density by position, [2, T], over layers, heads and sequences; None if no gate ran."""
        self._watch.close()
        seen = torch.stack(self._sums).double().sum(0).cpu().numpy() / self._seen if self._sums else None
        self._sums, self._seen = [], 0
        return seen
