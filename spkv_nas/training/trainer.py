"""A small subclass of ``transformers.Trainer``: parameter groups, phases, sound checkpoints of finite numbers alone.

Everything else (devices, accumulation, mixed precision, torchrun) is the library's. Of its checkpoints, a folder that
it writes file by file, ours are those that end with a manifest; a run resumes from the newest that agrees with its own.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from spkv_nas.base.distributed import num_processes, on_main, sum_over_processes
from spkv_nas.base.errors import UserError
from spkv_nas.base.interrupt import Interrupted, deferred
from spkv_nas.base.manifest import write_manifest
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.model.activation_checkpointing import recomputed
from spkv_nas.model.compiled import compiled
from spkv_nas.model.gates import predictor_parameters
from spkv_nas.model.loss import loss_in_chunks
from spkv_nas.model.weights import is_finite
from spkv_nas.training.callbacks import GatePhaseCallback, InterruptCallback, LogCallback, TokenProgressCallback
from spkv_nas.training.optimizer import make_optimizer
from spkv_nas.training.phases import GateSchedule, LearningRateSchedule
from spkv_nas.training.recipe import GatesConfig
from spkv_nas.training.run_files import (
    load_learned,
    load_optimizer_state,
    newest_checkpoint,
    remove_newer,
    remove_older,
    save_learned,
    writing,
)
from spkv_nas.training.sharding import shard_predictors, sharded_checkpoint
from spkv_nas.training.trackers import WANDB, EndWandbRun

_MOST_GROWTH = 1e4  # times the largest weight at the start, or 1 if that is more; in transformers few are above 100


class TrainingStoppedError(UserError):
    """Training met a number that is not finite, or a weight beyond any use; nothing was saved with it."""


class SPKVTrainer(Trainer):
    """``Trainer`` with SP-KV's parameter groups, learning rates and gate phases.

    Args:
        schedule: learning rate by step.
        gates: gate phases by step; None for a model without gates.
        gate_options: the recipe's section ``gates``: how the predictors learn.
        optimizer_state: file of ``save_optimizer_state`` to start from; parameters it lacks start fresh.
        recomputes: whether the backward pass computes the activations of layers again.
        compiles: whether decoder layers are compiled.
        title: of the run, in a bar of its steps that the ``reporter`` shows.
    """

    def __init__(
        self,
        *args: Any,
        schedule: LearningRateSchedule,
        gates: GateSchedule | None = None,
        gate_options: GatesConfig | None = None,
        optimizer_state: Path | None = None,
        recomputes: bool = False,
        compiles: bool = False,
        title: str = "training",
        reporter: Reporter = SILENT,
        callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ) -> None:
        self._title, self._reporter, self._shown = title, reporter, TokenProgressCallback()
        super().__init__(*args, callbacks=[self._shown, *callbacks], **kwargs)
        self._schedule = schedule
        self._most_weight = _MOST_GROWTH * max([1.0, *(_largest(p) for p in self.model.parameters())])
        self._gate_options = gate_options or GatesConfig()
        self._optimizer_state = optimizer_state
        self._ways = [way for way, wanted in ((recomputed, recomputes), (compiled, compiles)) if wanted]
        self.remove_callback(PrinterCallback)  # ours shows more
        self._log_state = LogCallback(self)
        self.add_callback(self._log_state)
        if WANDB in self.args.report_to:
            self.add_callback(EndWandbRun())
        self._length = len(self.train_dataset[0]["input_ids"]) if len(self.train_dataset) else 0
        self._mark: tuple[int, float] | None = None  # step and time of the last log
        self._phases = None if gates is None else GatePhaseCallback(gates, self._gate_options)
        if self._phases is not None:
            self.add_callback(self._phases)

    def train_or_resume(self) -> None:
        """Train to the last step, from the newest sound checkpoint if there is one; newer ones are removed.

        Raises:
            UserError: less text than one batch, a checkpoint of a run that was sharded otherwise, or a full disk.
            TrainingStoppedError: a number is not finite.
            Interrupted: a signal asked for it; a checkpoint of the step is there.
        """
        batch = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * num_processes()
        if len(self.train_dataset) < batch:
            raise UserError(
                f"the training text gives {len(self.train_dataset)} blocks, fewer than one batch of {batch}\n"
                "give more text, a smaller block_size or a smaller batch_size"
            )
        newest = on_main(lambda: newest_checkpoint(self._folder))
        if newest is not None and sharded_checkpoint(newest) != bool(self.args.fsdp):
            raise UserError(
                f"{newest} was written {'without' if self.args.fsdp else 'with'} sharding: fsdp, which this run cannot "
                "read\ngo on as it was begun, or delete it to start over"
            )
        on_main(lambda: remove_newer(self._folder, newest))
        with self._reporter.bar(self._title) as self._shown.bar, deferred() as pending:
            interrupt = InterruptCallback(pending)
            self.add_callback(interrupt)
            with loss_in_chunks(self.model), ExitStack() as ways:
                for way in self._ways:
                    ways.enter_context(way(self.model))
                self.train(resume_from_checkpoint=str(newest) if newest else None)
        pending.raise_if_any()
        if interrupt.ended:
            raise Interrupted(signal.SIGTERM)  # it came to another process

    @property
    def _folder(self) -> Path:
        return Path(self.args.output_dir)

    def _run_epoch(self, **kwargs: Any) -> None:
        """Leaves out what the library would train beyond the last step, where a run resumes there."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**kwargs)
        else:
            self.control.should_training_stop = True

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """``make_optimizer``'s, once the model is ready to be sharded."""
        model = model or self.model
        if self.args.fsdp:
            if not self.is_fsdp_enabled:
                raise UserError(f"sharding: fsdp needs GPUs; on {self.args.device.type} every process would hold all")
            shard_predictors(model, self.accelerator.state.fsdp_plugin, bfloat16=self.args.bf16)
        self.optimizer = make_optimizer(model, self.args, self._gate_options)
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
                logs["price"] = self._phases.price
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

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """A checkpoint of finite numbers alone, with a manifest, which is the last to be written."""
        self.check_finite()
        self._log_state.take()
        folder = self._folder / f"checkpoint-{self.state.global_step}"
        with writing(folder):
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        on_main(lambda: self._complete(folder))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """What learns, and nothing else, where some weights are frozen: the run's own beginning has the others."""
        if all(parameter.requires_grad for parameter in self.model.parameters()):
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            save_learned(self.model, Path(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not load_learned(self.model, Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _complete(self, checkpoint: Path) -> None:
        write_manifest(checkpoint)
        remove_older(self._folder)  # by step and only now; the library goes by file times, and before

    def check_finite(self) -> None:
        """Stop the run, on all processes, if a weight or its optimizer state is not finite, or a weight exploded."""
        kept = [(name, p, self.optimizer.state.get(p, {})) for name, p in self.model.named_parameters()]
        bad = [name for name, p, state in kept if not all(map(_is_whole, (p, *state.values())))]
        if sum_over_processes(torch.tensor(float(len(bad)))) > 0:
            self._stop(f"weight {bad[0]}" if bad else "weight of another process", math.nan)
        self._check_growth()

    def _check_growth(self) -> None:
        """Stop the run, on all processes, if an update threw a weight so far that training cannot come back.

        A learning rate of 1e20 leaves finite weights of 1e20: saved, they end every later attempt; at 1e30 the logits
        are all alike, and the run ends with the NLL of a uniform guess.
        """
        sizes = {name: _largest(p) for name, p in self.model.named_parameters() if p.requires_grad}
        name = max(sizes, key=lambda name: sizes[name])
        if sum_over_processes(torch.tensor(float(sizes[name] > self._most_weight))) > 0:
            self._stop(f"largest weight, of {name},", sizes[name])

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        norm = super()._clip_grad_norm(model)
        if norm is not None and not math.isfinite(float(norm)):
            self._stop("gradient norm", float(norm))
        return norm

    def _stop(self, what: str, value: float) -> None:
        good = newest_checkpoint(self._folder)
        raise TrainingStoppedError(
            f"training stopped at step {self.state.global_step}: the {what} is {value:.6g}; nothing was saved with it\n"
            f"last good checkpoint: {good or 'none yet'}\n"
            "lower the learning rate, or look at the data of this step"
        )


def _is_whole(value: Any) -> bool:
    """Whether a tensor, or this process's shard of it, is finite; of anything else true."""
    own = value.to_local() if isinstance(value, DTensor) else value
    return not isinstance(own, Tensor) or is_finite(own.detach())


def _largest(value: Tensor) -> float:
    """The largest magnitude in a tensor, or in this process's shard of it; 0 of an empty or quantized one."""
    own = value.to_local() if isinstance(value, DTensor) else value
    if own.is_meta or not own.is_floating_point() or own.numel() == 0 or own.itemsize == 1:
        return 0.0
    low, high = torch.aminmax(own.detach())
    return max(-float(low), float(high))
