"""Subclass of ``transformers.Trainer`` with SP-KV's parameter groups, gate phases and verified checkpoints.

A manifest of hashes completes each checkpoint, and runs resume from the newest one that matches its manifest.
"""

import math
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer, masking_utils
from transformers.trainer_callback import PrinterCallback

from spkv_nas.base import manifest, memory, progress
from spkv_nas.base.distributed import num_processes, on_main, sum_over_processes
from spkv_nas.base.errors import UserError
from spkv_nas.base.interrupt import Interrupted, deferred
from spkv_nas.model import modes, weight_files, weights
from spkv_nas.model.distillation import Distillation
from spkv_nas.model.gates import predictor_parameters
from spkv_nas.model.loss import loss_in_chunks, replaced
from spkv_nas.training import arguments, branch_config, callbacks, run_files, sharding
from spkv_nas.training.recipe import Recipe

_MAX_GROWTH = 1e4  # limit of weights, relative to the largest initial weight (at least 1)


class SPKVTrainer(Trainer):
    """``Trainer`` with SP-KV's parameter groups, learning rates and gate phases.

    Args:
        schedule: learning rate by step.
        gates: gate phases by step; None for a model without gates.
        gate_options: the recipe's section ``gates``, which configures the training of predictors.
        optimizer_state: file of ``save_optimizer_state`` to start from; parameters it lacks start with zero moments.
        recomputes: True to recompute layers' activations in the backward pass (activation checkpointing).
        compiles: True to compile decoder layers, those of a copied teacher too.
        distillation: loss with a teacher; None: the NLL.
    """

    def __init__(
        self,
        *args: Any,
        schedule: branch_config.LearningRateSchedule,
        gates: branch_config.GateSchedule | None = None,
        gate_options: branch_config.GatesConfig | None = None,
        optimizer_state: Path | None = None,
        recomputes: bool = False,
        compiles: bool = False,
        distillation: Distillation | None = None,
        title: str = "training",
        reporter: progress.Reporter = progress.SILENT,
        **kwargs: Any,
    ) -> None:
        """Create the trainer and its callbacks; further arguments are those of ``Trainer``."""
        super().__init__(*args, **kwargs)
        self._title = title
        self._reporter = reporter
        self._progress = callbacks.TokenProgressCallback()
        self.add_callback(self._progress)
        # Store how to train, and the largest weight to accept
        self._schedule = schedule
        largest = [1.0, *map(_largest, self.model.parameters())]
        self._max_weight = _MAX_GROWTH * max(largest)
        self._gate_options = gate_options or branch_config.GatesConfig()
        self._optimizer_state = optimizer_state
        self._recomputes = recomputes
        self._compiles = compiles
        # Set up logging
        self.remove_callback(PrinterCallback)  # replaced by TokenProgressCallback
        self._distillation = distillation
        self._log_state = callbacks.LogCallback(self, distillation)
        self.add_callback(self._log_state)
        if "wandb" in self.args.report_to:
            self.add_callback(callbacks.EndWandbRun())
        self._length = len(self.train_dataset[0]["input_ids"]) if len(self.train_dataset) else 0
        self._last_log: tuple[int, float] | None = None  # step and time of the last log
        self._recorded: list[
            tuple[int, str, torch.Tensor]
        ] = []  # step, name and value of numbers to check
        # Add the callback of gates
        self._phases = (
            None if gates is None else callbacks.GatePhaseCallback(gates, self._gate_options)
        )
        if self._phases is not None:
            self.add_callback(self._phases)

    def train_or_resume(self) -> None:
        """Train to the last step, resuming from the newest intact checkpoint, and remove newer ones.

        Raises:
            UserError: the text is shorter than one batch, the checkpoint was sharded differently, the disk is full, or
                a number is not finite, which is not saved.
            Interrupted: a signal stopped the run, after a checkpoint of its last step was saved.
        """
        # Check the text and the checkpoint
        batch = (
            self.args.per_device_train_batch_size
            * self.args.gradient_accumulation_steps
            * num_processes()
        )
        if len(self.train_dataset) < batch:
            raise UserError(
                f"the training text gives {len(self.train_dataset)} blocks, fewer than one batch "
                f"of {batch}\n"
                "give more text, a smaller block_size or a smaller batch_size"
            )
        newest = on_main(lambda: run_files.newest_checkpoint(self._folder))
        if newest is not None and any(newest.glob("pytorch_model_fsdp*")) != bool(self.args.fsdp):
            raise UserError(
                f"{newest} was written {'without' if self.args.fsdp else 'with'} sharding: fsdp, "
                "which this run cannot read\n"
                "go on as it was begun, or delete it to start over"
            )
        on_main(lambda: run_files.remove_checkpoints(self._folder, after=newest))
        # Train, deferring signals to the end of a step
        with self._reporter.bar(self._title, "steps") as self._progress.bar, deferred() as pending:
            interrupt = callbacks.InterruptCallback(pending)
            self.add_callback(interrupt)
            loss = self._distillation
            models = dict.fromkeys([self.model, *([] if loss is None else [loss.teacher.model])])
            begin_pass = None if loss is None else loss.begin_pass
            recomputing = modes.recomputed(self.model) if self._recomputes else nullcontext()
            compiling = modes.compiled(*models) if self._compiles else nullcontext()
            with loss_in_chunks(self.model, begin_pass), recomputing, compiling:
                self.train(resume_from_checkpoint=str(newest) if newest else None)
        pending.raise_if_any()
        if interrupt.ended:
            raise Interrupted(signal.SIGTERM)  # another rank received the signal

    @property
    def _folder(self) -> Path:
        return Path(self.args.output_dir)

    def _run_epoch(self, **kwargs: Any) -> None:
        """Run an epoch unless the last step is done: transformers would train further when resuming there."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**kwargs)
        else:
            self.control.should_training_stop = True

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer with ``make_optimizer``, after preparing the model for sharding.

        Raises ``UserError``: the run is sharded but there is no GPU, or the optimizer is not available.
        """
        model = model or self.model
        # Shard predictors and learned sinks before the optimizer refers to them
        if self.args.fsdp:
            if not self.is_fsdp_enabled:
                raise UserError(
                    f"sharding: fsdp needs GPUs; on {self.args.device.type} every process would "
                    "hold all"
                )
            plugin = self.accelerator.state.fsdp_plugin
            sharding.shard_added_modules(model, plugin, bfloat16=self.args.bf16)
            teacher = model if self._distillation is None else self._distillation.teacher.model
            if teacher is not model:
                sharding.shard_teacher(teacher, plugin)
        self.optimizer = arguments.make_optimizer(model, self.args, self._gate_options)
        # Remember the names of parameters, by which create_scheduler finds their shards
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._group_names = [
            [names[parameter] for parameter in group["params"]]
            for group in self.optimizer.param_groups
        ]
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the learning-rate scheduler, and load the optimizer state that the run starts from.

        The state is loaded here because this is the first hook after the model and the optimizer have been sharded.
        """
        optimizer = optimizer or self.optimizer
        # accelerate maps parameters by address, which empty shards share: map them by name
        if self.args.fsdp:
            sharded = dict(self.model.named_parameters())
            assert all(isinstance(parameter, DTensor) for parameter in sharded.values())
            for group, names in zip(optimizer.param_groups, self._group_names, strict=True):
                group["params"] = [sharded[name] for name in names]
        # Load the state that the run starts from
        if self.args.fsdp or self._optimizer_state is not None:
            run_files.load_optimizer_state(optimizer, self.model, self._optimizer_state)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._schedule.factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log ``logs``; if they contain the loss, add its parts, tokens per second and the gates' density."""
        heads = None
        # Add speed and the parts of the loss
        if "loss" in logs:
            step = self.state.global_step
            now = time.perf_counter()
            last_step, start = self._last_log or (step, now)
            args = self.args
            step_tokens = (
                args.train_batch_size
                * args.gradient_accumulation_steps
                * args.world_size
                * self._length
            )
            logs["tokens_per_second"] = (
                int(step_tokens) * (step - last_step) / max(now - start, 1e-9)
            )
            self._last_log = (step, now)
            logs |= {} if self._distillation is None else self._distillation.take_means()
            heads = self._phases.density if self._phases is not None else None
        # Add density and price
        if heads is not None and self._phases is not None:
            logs["density"] = float(np.nanmean(heads))
            if self._gate_options.target_density is not None:
                logs["price"] = float(self._phases.price)
        # Log, and keep the density of every head in the history
        super().log(logs, start_time)
        if heads is not None:
            self.state.log_history[-1]["head_density"] = heads.round(4).tolist()

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the next-token loss, and record it for ``_check_recorded``."""
        self._last_log = self._last_log or (self.state.global_step, time.perf_counter())
        # Without position_ids there are no packed documents, for which transformers would search, and wait, every time
        unpacked = replaced(
            masking_utils, "find_packed_sequence_indices", lambda position_ids: None
        )
        with nullcontext() if "position_ids" in inputs else unpacked:
            result = super().compute_loss(model, inputs, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if self.model.training:
            self._recorded.append((self.state.global_step, "loss", loss.detach()))
            is_replicated = self.args.world_size > 1 and not self.args.fsdp
            phases = self._phases
            if is_replicated and phases is not None and phases.frozen(self.state.global_step):
                # DDP waits for a gradient of every parameter, so keep frozen predictors in the graph
                sums = (parameter.sum() for parameter in predictor_parameters(self.model))
                return loss + 0.0 * sum(sums, start=0.0)
        return result

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint after checking that all numbers are finite, and complete it with a manifest."""
        if self._phases is not None:
            self._recorded.append(
                (self.state.global_step, "price of keys", torch.as_tensor(self._phases.price))
            )
        self._check_recorded()
        self.check_finite()
        self._log_state.take()
        folder = self._folder / f"checkpoint-{self.state.global_step}"
        with run_files.writing(folder):
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        on_main(lambda: manifest.write_manifest(folder))
        # By step, after the new one is complete; transformers would go by file times
        on_main(lambda: run_files.remove_checkpoints(self._folder, keep=run_files.KEPT))

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Save the model, or only its trainable parameters if some are frozen: setup restores the others."""
        if all(parameter.requires_grad for parameter in self.model.parameters()):
            with weight_files.default_generation(self.model):
                super()._save(output_dir, state_dict)
        elif self.args.should_save:
            run_files.save_learned(self.model, Path(output_dir or self.args.output_dir))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        if not run_files.load_learned(self.model, Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def check_finite(self) -> None:
        """Stop the run on all ranks if a weight or its optimizer state is not finite, or a weight has exploded.

        A learning rate of 1e20 leaves finite weights of 1e20, and a checkpoint with them makes every later attempt
        fail; at 1e30, all logits are equal and the run ends with the NLL of a uniform guess. Raises ``UserError``.
        """
        parameters = dict(self.model.named_parameters())
        sizes = {name: _largest(parameter) for name, parameter in parameters.items()}
        not_finite = None
        for name, parameter in parameters.items():
            state = self.optimizer.state.get(parameter, {})
            if not all(map(math.isfinite, (sizes[name], *map(_largest, state.values())))):
                not_finite = name
                break
        if sum_over_processes(torch.tensor(float(not_finite is not None))) > 0:
            what = "weight of another process" if not_finite is None else f"weight {not_finite}"
            self._stop(what, math.nan)
        # Look for explosion only among weights that are trained
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        name = max(trained, key=sizes.__getitem__)
        if sum_over_processes(torch.tensor(float(sizes[name] > self._max_weight))) > 0:
            self._stop(f"largest weight, of {name},", sizes[name])

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of the gradients, on the device, after recording it.

        Recorded numbers are checked before the update of a step that logs. Other steps wait for nothing.
        """
        norm = super()._get_grad_norm(model, grad_norm)
        step = self.state.global_step
        self._recorded.append((step, "gradient norm", norm.detach()))
        if (step + 1) % self.args.logging_steps == 0:
            self._check_recorded()
        return norm

    def _check_recorded(self) -> None:
        """Stop the run on all ranks if a loss or gradient norm since the last call is not finite, naming the first."""
        if not self._recorded:
            return
        values = torch.stack(
            [sharding.whole(value).float().to(self.args.device) for _, _, value in self._recorded]
        )
        means = (sum_over_processes(values) / num_processes()).tolist()
        for (step, what, _), mean in zip(self._recorded, means, strict=True):
            if not math.isfinite(mean):
                self._stop(what, mean, step)
        self._recorded.clear()

    def _stop(self, what: str, value: float, step: int | None = None) -> None:
        """Raise ``UserError`` with the step, by default the current one, and the last good checkpoint."""
        checkpoint = run_files.newest_checkpoint(self._folder)
        step = self.state.global_step if step is None else step
        raise UserError(
            f"training stopped at step {step}: the {what} is {value:.6g}; nothing was saved with "
            "it\n"
            f"last good checkpoint: {checkpoint or 'none yet'}\n"
            "lower the learning rate, or look at the data of this step"
        )


def train_in_fitting_passes(
    recipe: Recipe, begin: Callable[[Recipe], SPKVTrainer], least: int = 1
) -> SPKVTrainer:
    """Train or resume a run with the trainer of ``begin(recipe)``, halving the micro-batch whenever memory runs out.

    The option ``auto_find_batch_size`` of transformers would reduce the batch. Here the run restarts from its last
    checkpoint, so that no state of the failed step remains: gradients, gate counts or prices. Warns of the smaller
    size. Raises ``UserError``: memory runs out on one of several ranks, or as in ``SPKVTrainer.train_or_resume``.
    torch.OutOfMemoryError: memory is too small for ``least`` blocks.
    """
    while True:
        trainer = begin(recipe)
        size = trainer.args.per_device_train_batch_size
        try:
            trainer.train_or_resume()
            return trainer
        except Exception as error:
            if size == least or not memory.is_short_of_memory(error):
                raise
            if num_processes() > 1:  # the other ranks are waiting for this one
                raise UserError(
                    f"out of memory for {size} blocks per pass: set a smaller micro_batch_size"
                ) from error
        # Free the memory, and resume with half the blocks
        del trainer
        memory.empty_cache()
        fewer = max(size // 2, least)
        warnings.warn(
            f"out of memory for {size} blocks per pass: continuing with at most {fewer}",
            stacklevel=2,
        )
        recipe = recipe.model_copy(update={"micro_batch_size": fewer})


def _largest(value: Any) -> float:
    """Return the largest magnitude in a tensor or this rank's shard of it, NaN if one is; 0 for anything else."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return weights.largest(local.detach()) if isinstance(local, torch.Tensor) else 0.0
