"""A small subclass of ``transformers.Trainer``: parameter groups, phases, a stop on non-finite numbers.

Everything else (devices, accumulation, mixed precision, checkpoints, torchrun) is the library's.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.errors import UserError
from spkv_nas.evaluation.density import DensityWatch
from spkv_nas.files import write_atomic
from spkv_nas.model.gates import predictor_parameters
from spkv_nas.model.hook import set_gate_mode
from spkv_nas.training.phases import GateSchedule, LearningRateSchedule


class TrainingStoppedError(UserError):
    """Training met a loss or gradient that is not finite; nothing was updated with it."""


class BlockDataset(Dataset[dict[str, Tensor]]):
    """Token blocks as the trainer wants them: ``input_ids`` and ``labels`` [T]."""

    def __init__(self, blocks: TokenBlocks) -> None:
        self._tokens = blocks.tokens

    def __len__(self) -> int:
        return int(self._tokens.shape[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self._tokens[index].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


class SPKVTrainer(Trainer):
    """``Trainer`` with SP-KV's parameter groups, learning rates and gate phases.

    Args:
        schedule: learning rate by step.
        gates: gate phases by step; None for a model without gates.
        predictor_learning_rate_multiplier: learning rate of the predictors relative to the model's (paper: 5).
        predictor_weight_decay: of the predictors (paper: 0.1).
        tau: threshold of the hard phase.
        optimizer_state: file of ``save_optimizer_state`` to start from; parameters it lacks start fresh.
    """

    def __init__(
        self,
        *args: Any,
        schedule: LearningRateSchedule,
        gates: GateSchedule | None = None,
        predictor_learning_rate_multiplier: float = 5.0,
        predictor_weight_decay: float = 0.1,
        tau: float = 0.5,
        optimizer_state: Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._schedule = schedule
        self._predictor_multiplier = predictor_learning_rate_multiplier
        self._predictor_weight_decay = predictor_weight_decay
        self._optimizer_state = optimizer_state
        self.remove_callback(PrinterCallback)  # TokenProgressCallback shows more
        if gates is not None:
            self.add_callback(GatePhaseCallback(gates, tau))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW (betas 0.9, 0.95): matrices decay, vectors do not, predictors have their own rate and decay."""
        model = model or self.model
        own = predictor_parameters(model)
        groups = [
            ([p for p in model.parameters() if p not in own and p.ndim >= 2], 1.0, self.args.weight_decay),
            ([p for p in model.parameters() if p not in own and p.ndim < 2], 1.0, 0.0),
            (
                [p for p in own_in_order(model, own) if p.ndim >= 2],
                self._predictor_multiplier,
                self._predictor_weight_decay,
            ),
            ([p for p in own_in_order(model, own) if p.ndim < 2], self._predictor_multiplier, 0.0),
        ]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": params, "lr": self.args.learning_rate * multiplier, "weight_decay": decay}
                for params, multiplier, decay in groups
                if params
            ],
            betas=(0.9, 0.95),
            fused=True,
        )
        if self._optimizer_state is not None:
            load_optimizer_state(self.optimizer, model, self._optimizer_state)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """One factor for all groups, from the recipe's schedule."""
        optimizer = optimizer or self.optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._schedule.factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Next-token loss; stops the run before the update when it is not finite."""
        result = super().compute_loss(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if self.model.training and not torch.isfinite(loss.detach()):
            self._stop("loss", float(loss.detach()))
        return result

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        norm = super()._clip_grad_norm(model)
        if norm is not None and not math.isfinite(float(norm)):
            self._stop("gradient norm", float(norm))
        return norm

    def _stop(self, what: str, value: float) -> None:
        good = newest_complete_checkpoint(Path(self.args.output_dir))
        raise TrainingStoppedError(
            f"training stopped at step {self.state.global_step}: the {what} is {value}; nothing was updated with it\n"
            f"last good checkpoint: {good or 'none yet'}\n"
            "lower the learning rate, or look at the data of this step"
        )


def own_in_order(model: nn.Module, own: set[Any]) -> list[nn.Parameter]:
    """The parameters of ``own`` in the model's order."""
    return [p for p in model.parameters() if p in own]


class GatePhaseCallback(TrainerCallback):
    """Sets the gate mode of each step; a frozen predictor takes part in no update."""

    def __init__(self, schedule: GateSchedule, tau: float) -> None:
        self._schedule = schedule
        self._tau = tau

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        phase = self._schedule.at(state.global_step)
        set_gate_mode(kwargs["model"], phase.mode, self._tau, anneal=phase.anneal)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._schedule.at(state.global_step).frozen:
            for parameter in predictor_parameters(kwargs["model"]):
                parameter.grad = None


class TokenProgressCallback(ProgressCallback):
    """The trainer's progress bar with loss, mean density and tokens per second, which also enter the log history."""

    def __init__(self, title: str, tokens_per_step: int) -> None:
        super().__init__()
        self._title, self._tokens_per_step = title, tokens_per_step
        self._watch: DensityWatch | None = None
        self._mark = (0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self._title)
        self._mark = (state.global_step, time.perf_counter())
        self._watch = DensityWatch(kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is not None and (state.global_step + 1) % args.logging_steps == 0:
            self._watch.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        step, now = state.global_step, time.perf_counter()
        entry = {"tokens_per_second": (step - self._mark[0]) * self._tokens_per_step / max(now - self._mark[1], 1e-9)}
        self._mark = (step, now)
        density = self._watch.stop() if self._watch is not None else math.nan
        if not math.isnan(density):
            entry["density"] = density
        state.log_history[-1].update(entry)
        if self.training_bar is not None:
            shown = {"loss": f"{float(logs['loss']):.3f}", "tok/s": f"{entry['tokens_per_second']:,.0f}"}
            if "density" in entry:
                shown["density"] = f"{density:.2f}"
            self.training_bar.set_postfix(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        if self._watch is not None:
            self._watch.stop()


# ---------------------------------------------------------------- checkpoints of a run


def newest_complete_checkpoint(folder: Path) -> Path | None:
    """The newest ``checkpoint-N`` whose last-written file parses; a killed run can leave an incomplete newer one."""
    steps = {int(p.name.split("-")[1]): p for p in folder.glob("checkpoint-*") if p.name.split("-")[1].isdigit()}
    for step in sorted(steps, reverse=True):
        try:
            json.loads((steps[step] / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return steps[step]
    return None


def write_train_log(state: TrainerState, path: Path) -> None:
    """Write the log history as CSV: step, loss, learning_rate, density (empty without gates), tokens_per_second."""
    columns = ("step", "loss", "learning_rate", "density", "tokens_per_second")
    rows = [entry for entry in state.log_history if "loss" in entry]
    lines = [",".join(f"{entry[c]:.6g}" if c in entry else "" for c in columns) for entry in rows]
    write_atomic(path, "\n".join([",".join(columns), *lines]) + "\n")


def save_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    """Save AdamW's moments by parameter name, so that branches with other parameter groups can start from them."""
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensors[f"{names[parameter]}::{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    save_file(tensors, path)


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    """Fill AdamW's moments from ``save_optimizer_state``; parameters that the file lacks keep a fresh state."""
    saved: Mapping[str, Tensor] = load_file(path)
    for name, parameter in model.named_parameters():
        state = {key: saved.get(f"{name}::{key}") for key in ("step", "exp_avg", "exp_avg_sq")}
        if all(value is not None for value in state.values()):
            optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device, parameter.dtype)
                for key, value in state.items()
                if value is not None
            }
