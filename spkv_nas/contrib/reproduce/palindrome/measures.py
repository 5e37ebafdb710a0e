"""Evaluation on the palindrome task: NLL of the output, and utility and density of the gates."""

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
from spkv_nas.contrib.reproduce.palindrome.task import KINDS, Palindromes
from spkv_nas.model.gates import predictors
from spkv_nas.model.hooks import watch_logits
from spkv_nas.model.modes import gate_mode


@dataclass(frozen=True)
class Measures:
    """Results of a model on the task; those of gates are None if it has none.

    Attributes:
        nll: nats per output token with soft gates.
        hard_nll: nats per output token with hard gates.
        mean_utility: mean utility over heads and tokens.
        density: density of hard gates, mean over heads and tokens.
        kept: density by kind of token.
    """

    nll: float
    hard_nll: float | None = None
    mean_utility: float | None = None
    density: float | None = None
    kept: dict[str, float] | None = None


def take_measures(
    model: PreTrainedModel, sequences: Palindromes, tau: float = 0.5, *, batch_size: int = 64
) -> Measures:
    """Evaluate a model on ``sequences``, with soft gates and with hard gates at threshold ``tau``."""
    if not predictors(model):
        return Measures(output_nll(model, sequences, batch_size))
    # Soft gates
    watch = GateWatch(model, tau)
    watch.start()
    nll = output_nll(model, sequences, batch_size)
    soft = watch.stop()
    # Hard gates
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
    """Compute nats per output token in evaluation mode, in the current gate mode."""
    was_training = model.training
    model.eval()
    total = 0.0
    # Sum the NLL of the output tokens batch by batch
    for start in range(0, len(sequences), batch_size):
        rows = [sequences[index] for index in range(start, min(start + batch_size, len(sequences)))]
        tokens = torch.stack([row["input_ids"] for row in rows]).to(model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[:, -sequences.num_outputs - 1 : -1]
        targets = tokens[:, -sequences.num_outputs :].flatten()
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum"))
    model.train(was_training)
    return total / (len(sequences) * sequences.num_outputs)


class GateWatch:
    """Recorder of mean utility and density (``u >= tau``) of all gates by position, between ``start`` and ``stop``."""

    def __init__(self, model: nn.Module, tau: float = 0.5) -> None:
        """Record the gates of ``model``, with density at threshold ``tau``."""
        self._model = model
        self._threshold_logit = threshold_logit(tau)
        self._hooks = ExitStack()
        self._sums: list[Tensor] = []  # [2, T] sums over heads and sequences, by forward pass and layer
        self._num_rows = 0

    def start(self) -> None:
        """Start recording, and discard what was recorded before."""
        self.stop()
        self._hooks = watch_logits(self._model, self._add)

    def _add(self, _layer: int, logits: Tensor) -> None:
        """Add the utility logits [B, H, T] of one layer."""
        logits = logits.detach().flatten(0, 1)  # [B * H, T]
        self._sums.append(torch.stack([torch.sigmoid(logits).sum(0), (logits >= self._threshold_logit).float().sum(0)]))
        self._num_rows += len(logits)

    def stop(self) -> NDArray[np.float64] | None:
        """Stop, and return mean utility and density by position [2, T]; None if no gate ran.

        The means are over layers, heads and sequences.
        """
        self._hooks.close()
        means = torch.stack(self._sums).double().sum(0).cpu().numpy() / self._num_rows if self._sums else None
        self._sums, self._num_rows = [], 0
        return means
