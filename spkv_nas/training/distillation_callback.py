"""Trainer callback of distillation: its first stage, and the parts of its loss in logs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from spkv_nas.base.distributed import num_processes, sum_over_processes
from spkv_nas.model.attention import attention_layers
from spkv_nas.model.distillation import Distillation


class DistillationCallback(TrainerCallback, ExportableState):
    """Callback that switches from attention transfer to predictions, and averages the parts of the loss for logs.

    The sums since the last log line are saved with the trainer's state, so that logs of resumed runs agree.

    Attributes:
        loss: the loss of training passes, which collects its parts.
    """

    def __init__(self, loss: Distillation, transfer_steps: int) -> None:
        """Train attention layers alone in the first ``transfer_steps`` steps."""
        self.loss, self._transfer_steps = loss, transfer_steps
        self._saved: list[float] = []

    def take(self) -> None:
        """Average the sums over ranks, for a checkpoint; must be called on all ranks."""
        self._saved = (self._all_sums() / num_processes()).tolist()

    def take_means(self) -> dict[str, float]:
        """Return the mean parts of the loss since the last call, over all ranks; must be called on all ranks."""
        sums = self._all_sums()
        self.loss.sums = torch.zeros_like(self.loss.sums)
        return self.loss.means(sums)

    def _all_sums(self) -> Tensor:
        return sum_over_processes(self.loss.sums)

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {"args": {}, "attributes": {"sums": self._saved}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move a copied teacher to the device, and restore the sums of a resumed run."""
        teacher = self.loss.teacher.model
        if teacher is not kwargs["model"]:
            teacher.to(args.device)
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and saved and saved["attributes"]["sums"]:
            self.loss.sums = torch.tensor(saved["attributes"]["sums"], dtype=torch.float64)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Choose the loss of the step."""
        self.loss.transfers = state.global_step < self._transfer_steps

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave weights outside attention layers out of updates that train these layers alone."""
        if not self.loss.transfers:
            return
        model = kwargs["model"]
        attention = {p for layer in attention_layers(model).values() for p in layer.parameters()}
        for parameter in model.parameters():
            if parameter not in attention:
                parameter.grad = None
