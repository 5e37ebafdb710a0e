"""A small subclass of ``transformers.Trainer``: parameter groups, phases, a stop on non-finite numbers.

Everything else (devices, accumulation, mixed precision, checkpoints, torchrun) is the library's.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback

from spkv_nas.base.distributed import num_processes, on_main, sum_over_processes
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.density import DensityWatch
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.split import split_evaluation
from spkv_nas.evaluation.sweep import Evaluation, evaluate
from spkv_nas.model.gates import predictor_parameters
from spkv_nas.model.modes import gate_mode, set_density_weight, set_gate_mode
from spkv_nas.training.phases import GateSchedule, LearningRateSchedule
from spkv_nas.training.recipe import GatesConfig
from spkv_nas.training.run_files import load_optimizer_state, newest_complete_checkpoint
from spkv_nas.training.sharding import shard_predictors, sharded_checkpoint

# Of the density controller: lambda is a multiple of the error, and of its sum over steps.
PROPORTIONAL, INTEGRAL = 1.0, 0.05


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
        gate_options: the recipe's section ``gates``: how the predictors learn.
        optimizer_state: file of ``save_optimizer_state`` to start from; parameters it lacks start fresh.
    """

    def __init__(
        self,
        *args: Any,
        schedule: LearningRateSchedule,
        gates: GateSchedule | None = None,
        gate_options: GatesConfig | None = None,
        optimizer_state: Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._schedule = schedule
        self._gate_options = gate_options or GatesConfig()
        self._optimizer_state = optimizer_state
        self.remove_callback(PrinterCallback)  # TokenProgressCallback shows more
        self._length = len(self.train_dataset[0]["input_ids"]) if len(self.train_dataset) else 0
        self._mark: tuple[int, float] | None = None  # step and time of the last log
        self._phases = None if gates is None else GatePhaseCallback(gates, self._gate_options)
        if self._phases is not None:
            self.add_callback(self._phases)

    def train_or_resume(self) -> None:
        """Train to the last step, from the newest complete checkpoint if there is one.

        Raises:
            UserError: less text than one batch, or a checkpoint of a run that was sharded otherwise.
        """
        batch = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * num_processes()
        if len(self.train_dataset) < batch:
            raise UserError(
                f"the training text gives {len(self.train_dataset)} blocks, fewer than one batch of {batch}\n"
                "give more text, a smaller block_size or a smaller batch_size"
            )
        newest = on_main(lambda: newest_complete_checkpoint(Path(self.args.output_dir)))
        if newest is not None and sharded_checkpoint(newest) != bool(self.args.fsdp):
            raise UserError(
                f"{newest} was written {'without' if self.args.fsdp else 'with'} sharding: fsdp, which this run cannot "
                "read\ngo on as it was begun, or delete it to start over"
            )
        self.train(resume_from_checkpoint=str(newest) if newest else None)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW (betas 0.9, 0.95): matrices decay, vectors do not, predictors have their own rate and decay."""
        model = model or self.model
        if self.args.fsdp:
            if not self.is_fsdp_enabled:
                raise UserError(f"sharding: fsdp needs GPUs; on {self.args.device.type} every process would hold all")
            shard_predictors(model, self.accelerator.state.fsdp_plugin, bfloat16=self.args.bf16)
        own, options = predictor_parameters(model), self._gate_options
        learning = [p for p in model.parameters() if p.requires_grad]
        groups = [
            ([p for p in learning if p not in own and p.ndim >= 2], 1.0, self.args.weight_decay),
            ([p for p in learning if p not in own and p.ndim < 2], 1.0, 0.0),
            ([p for p in learning if p in own and p.ndim >= 2], options.learning_rate_multiplier, options.weight_decay),
            ([p for p in learning if p in own and p.ndim < 2], options.learning_rate_multiplier, 0.0),
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
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._group_names = [[names[p] for p in group["params"]] for group in self.optimizer.param_groups]
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """One factor for all groups, from the recipe's schedule.

        Model and optimizer are ready by now, sharded if they are to be, so the optimizer's state is filled here.
        """
        optimizer = optimizer or self.optimizer
        if self.args.fsdp:  # accelerate has exchanged the parameters by their addresses, which empty shards share
            sharded = dict(self.model.named_parameters())
            assert all(isinstance(parameter, DTensor) for parameter in sharded.values())
            for group, names in zip(optimizer.param_groups, self._group_names, strict=True):
                group["params"] = [sharded[name] for name in names]
        if self.args.fsdp or self._optimizer_state is not None:
            load_optimizer_state(optimizer, self.model, self._optimizer_state)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._schedule.factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds tokens per second and the gates' density to what is logged with the loss."""
        heads = None
        if "loss" in logs:
            step, now = self.state.global_step, time.perf_counter()
            since, start = self._mark or (step, now)
            logs["tokens_per_second"] = self._tokens_per_step() * (step - since) / max(now - start, 1e-9)
            self._mark = (step, now)
            heads = self._phases.density if self._phases is not None else None
        if heads is not None and self._phases is not None:
            logs["density"] = float(np.nanmean(heads))
            if self._gate_options.target_density is not None:
                logs["density_weight"] = self._phases.weight
        super().log(logs, start_time)
        if heads is not None:
            self.state.log_history[-1]["head_density"] = heads.round(4).tolist()

    def _tokens_per_step(self) -> int:
        args = self.args
        return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size * self._length)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Next-token loss; stops the run, on all processes, before the update when it is not finite."""
        self._mark = self._mark or (self.state.global_step, time.perf_counter())
        result = super().compute_loss(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if self.model.training:
            mean = sum_over_processes(loss.detach()) / num_processes()
            if not torch.isfinite(mean):
                self._stop("loss", float(mean))
            replicated = self.args.world_size > 1 and not self.args.fsdp
            if replicated and self._phases is not None and self._phases.frozen(self.state.global_step):
                # DDP waits for a gradient of every parameter
                return loss + 0.0 * sum((p.sum() for p in predictor_parameters(self.model)), start=0.0)
        return result

    def _save_rng_state(self, output_dir: str) -> None:
        """Waits for all processes: a checkpoint is complete when process 0 has written what follows."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

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


class GatePhaseCallback(TrainerCallback, ExportableState):
    """Sets the gate mode of each step, measures its density, and moves the regulariser's weight toward a target.

    A frozen predictor takes part in no update. The weight is saved with the trainer's state, so a resumed run agrees.
    Processes sample their gates independently, and agree on the density.

    Attributes:
        density: [layers, KV heads] of the last measured step, None before.
        weight: lambda of the density regulariser, of the recipe or as the target has moved it.
    """

    def __init__(self, schedule: GateSchedule, options: GatesConfig) -> None:
        self._schedule, self._options = schedule, options
        self._watch: DensityWatch | None = None
        self.density: NDArray[np.float64] | None = None
        self.weight = self._sum = options.density_weight

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this."""
        return {"args": {}, "attributes": {"weight": self.weight, "_sum": self._sum}}

    def frozen(self, step: int) -> bool:
        """Whether predictors are frozen in a step."""
        return self._schedule.at(step).frozen

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._watch = DensityWatch(kwargs["model"])
        if args.process_index:  # all were seeded alike, and the data's order is drawn; a checkpoint restores its own
            torch.manual_seed(args.seed + args.process_index)
        saved = state.stateful_callbacks.get(type(self).__name__)
        for name, value in (saved["attributes"] if saved else {}).items():
            setattr(self, name, value)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._watch is not None
        phase, options = self._schedule.at(state.global_step), self._options
        set_gate_mode(kwargs["model"], phase.mode, options.tau, anneal=phase.anneal, p_min=options.p_min)
        set_density_weight(kwargs["model"], 0.0 if phase.frozen else self.weight / args.gradient_accumulation_steps)
        if options.target_density is not None or (state.global_step + 1) % args.logging_steps == 0:
            self._watch.start()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._watch is not None
        measured = self._watch.stop()
        if measured is not None:
            measured = (sum_over_processes(torch.from_numpy(measured)) / num_processes()).cpu().numpy()
            self.density = measured
        if self.frozen(state.global_step):
            for parameter in predictor_parameters(kwargs["model"]):
                parameter.grad = None
        elif self._options.target_density is not None and measured is not None:
            error = self._options.target_density - float(np.nanmean(measured))
            self._sum += INTEGRAL * error
            self.weight = self._sum + PROPORTIONAL * error


class HeldoutCallback(TrainerCallback):
    """Every so many steps: held-out NLL with soft and with hard gates, and the density of the hard ones."""

    def __init__(self, trainer: SPKVTrainer, blocks: TokenBlocks, every: int) -> None:
        self._trainer, self._blocks, self._every = trainer, blocks, every

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self._every:
            return
        model, size = kwargs["model"], args.per_device_train_batch_size
        with gate_mode(model, "soft"):
            soft = split_evaluation(
                model, self._blocks, size, lambda part: Evaluation(document_nll(model, part, batch_size=size))
            )
        hard = split_evaluation(model, self._blocks, size, lambda part: evaluate(model, part, batch_size=size))
        assert hard.density is not None
        should_log = control.should_log  # the step's own loss, which logging anything else would cancel
        self._trainer.log(
            {"heldout_soft_nll": soft.nll.mean, "heldout_hard_nll": hard.nll.mean, "heldout_density": hard.density}
        )
        control.should_log = should_log


class TokenProgressCallback(ProgressCallback):
    """The trainer's progress bar with loss, mean density and tokens per second."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self._title)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            shown = {"loss": f"{float(logs['loss']):.3f}", "tok/s": f"{logs['tokens_per_second']:,.0f}"}
            if "density" in logs:
                shown["density"] = f"{logs['density']:.2f}"
            self.training_bar.set_postfix(shown)
