"""Trainer callbacks: gate phases, longer blocks, logging, trackers, progress and interruption.

Longer blocks extend a model's rotary positions (RoPE) by transformers' ``rope_parameters``.
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from spkv_nas.base import arrays, distributed, interrupt, progress
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.model import density_tracker, distillation, gates, modes
from spkv_nas.training.branch_config import ExtendConfig, GateSchedule, GatesConfig

_GLOBAL = "full_attention"  # layer kind whose RoPE changes if each kind has its own
# Settings that stay when the type of RoPE changes
_OF_ALL_TYPES = ("rope_theta", "partial_rotary_factor")


class InterruptCallback(TrainerCallback):
    """Callback that saves a checkpoint and stops training after the step in which any rank received a signal."""

    def __init__(self, pending: interrupt.Pending) -> None:
        """Watch for a signal in ``pending``."""
        self._pending = pending
        self.ended = False  # True if training was stopped

    def on_step_end(
        self, _args: object, _state: object, control: TrainerControl, **_: object
    ) -> None:
        """Stop on all ranks if any of them received a signal."""
        ended = np.array([self._pending.number is not None], np.int64)
        self.ended = bool(distributed.sum_over_processes(ended)[0])
        if self.ended:
            control.should_save = True
            control.should_training_stop = True


class LogCallback(TrainerCallback, ExportableState):
    """Callback that stores what was summed since the last log line, so that logs of resumed runs agree.

    That is the loss, and the parts of a loss with a teacher, whose copied model it moves to the device.
    """

    def __init__(self, trainer: Trainer, distillation: distillation.Distillation | None) -> None:
        """Read and restore the loss of ``trainer``, and the sums of ``distillation``."""
        self._trainer = trainer
        self._distillation = distillation
        # sum of the losses of the steps after ``since``, the last log line, and of their parts, averaged over ranks
        self._saved: dict[str, object] = {"total": 0.0, "since": 0, "sums": []}

    def take(self) -> None:
        """Copy the sums; must be called on all ranks."""
        total = self._trainer._tr_loss
        number = distributed.num_processes()
        self._saved["total"] = float(distributed.sum_over_processes(total)) / number
        self._saved["since"] = int(self._trainer._globalstep_last_logged)
        if self._distillation is not None:
            sums = distributed.sum_over_processes(self._distillation.sums)
            self._saved["sums"] = (sums / number).tolist()

    def state(self) -> dict[str, object]:
        """Return the state to save in a checkpoint."""
        return {"args": {}, "attributes": self._saved}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, _control: object, **kwargs: Any
    ) -> None:
        """Restore the sums of a resumed run, and move a copied teacher to the device, unless it is sharded."""
        # The entry is absent in old checkpoints
        entry = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        is_current = state.global_step and entry["attributes"]["since"] <= state.global_step
        if is_current:
            self._trainer._tr_loss = torch.tensor(entry["attributes"]["total"], device=args.device)
            self._trainer._globalstep_last_logged = entry["attributes"]["since"]
        if self._distillation is None:
            return
        teacher = self._distillation.teacher.model
        if teacher is not kwargs["model"] and not distributed.is_sharded(teacher):
            teacher.to(args.device)
        if is_current and (sums := entry["attributes"].get("sums")):
            self._distillation.sums = torch.tensor(sums, dtype=torch.float64)


class GatePhaseCallback(TrainerCallback, ExportableState):
    """Callback that sets the gate mode of each step, measures density, and adjusts the price to the target density.

    Frozen predictors are left out of updates. The price is saved with the trainer's state, so that resumed runs agree.
    Ranks sample their gates independently, but share density and price.
    """

    def __init__(self, schedule: GateSchedule, options: GatesConfig) -> None:
        """Follow the gate phases of ``schedule``."""
        self._schedule = schedule
        self._options = options
        self._tracker: density_tracker.DensityTracker | None = None
        # Those of the tracker in the last measured step, on the device
        self._counts: torch.Tensor | None = None
        # Adjusts the price; None without a target density
        self._controller: density_tracker.Price | None = None
        if options.target_density is not None:
            self._controller = density_tracker.Price(options.target_density)
        self._benefits: density_tracker.KeyBenefitEstimator | None = None

    @property
    def density(self) -> arrays.Float | None:
        """Read the densities [layers, KV heads] of the last measured step; None before the first.

        Raises ``UserError``: a utility was not finite.
        """
        return None if self._counts is None else density_tracker.head_densities(self._counts)

    @property
    def price(self) -> torch.Tensor | float:
        """Return the price of a key in the next step: the recipe's, or the one adjusted to the target density."""
        return self._options.price if self._controller is None else self._controller.value

    def state(self) -> dict[str, object]:
        """Return the state to save in a checkpoint."""
        price = None if self._controller is None else self._controller.state()
        return {"args": {}, "attributes": {"price": price}}

    def frozen(self, step: int) -> bool:
        """Return True if predictors are frozen in training step ``step``."""
        return self._schedule.at(step).frozen

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, _control: object, **kwargs: Any
    ) -> None:
        """Restore the price of a resumed run, and give each rank its own random seed."""
        self._tracker = density_tracker.DensityTracker(kwargs["model"], only_learning=True)
        # The data order is already drawn; a checkpoint restores each rank's random state
        if args.process_index:
            torch.manual_seed(args.seed + args.process_index)
        saved = state.stateful_callbacks.get(type(self).__name__)
        saved_price = saved["attributes"].get("price") if saved else None
        if saved_price and self._controller is not None:
            self._controller.restore(saved_price)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, _control: object, **kwargs: Any
    ) -> None:
        """Set the gate mode and the price, and start measuring where needed."""
        assert self._tracker is not None
        phase = self._schedule.at(state.global_step)
        options = self._options
        modes.set_gate_mode(
            kwargs["model"], phase.mode, options.tau, anneal=phase.anneal, p_min=options.p_min
        )
        price = 0.0 if phase.frozen else self.price / args.gradient_accumulation_steps
        modes.set_price(kwargs["model"], price)
        adjusts_price = self._controller is not None and not phase.frozen
        if adjusts_price or (state.global_step + 1) % args.logging_steps == 0:
            self._tracker.start()
        if self._controller is not None and not phase.frozen and not self._controller.first:
            self._benefits = density_tracker.KeyBenefitEstimator(kwargs["model"])

    def on_pre_optimizer_step(
        self, _args: object, state: TrainerState, _control: object, **kwargs: Any
    ) -> None:
        """Record the density, leave frozen predictors out of the update, and adjust the price."""
        # Record the density
        assert self._tracker is not None
        counts = self._tracker.stop_counting()
        if counts is not None:
            self._counts = counts
        # Set the first price from the benefits of keys, averaged over ranks
        if self._benefits is not None and self._controller is not None:
            benefits = distributed.sum_over_processes(self._benefits.stop())
            self._controller.begin(benefits / distributed.num_processes())
            self._benefits = None
        # Leave frozen predictors out of the update, else adjust the price
        if self.frozen(state.global_step):
            for parameter in gates.predictor_parameters(kwargs["model"]):
                parameter.grad = None
        elif self._controller is not None and counts is not None:
            learning_rate = kwargs["optimizer"].param_groups[0]["lr"]
            self._controller.move(density_tracker.mean_density(counts), learning_rate)


class ExtensionCallback(TrainerCallback):
    """Callback that extends the model's positions before the first step with longer blocks."""

    def __init__(self, extend: ExtendConfig, steps: int) -> None:
        """Extend positions during a branch of ``steps`` steps."""
        self._extend = extend
        self._step = extend.first_step(steps)
        self._done = False

    def on_step_begin(
        self, _args: object, state: TrainerState, _control: object, **kwargs: Any
    ) -> None:
        """Extend positions once, from the step of the extension on."""
        if not self._done and state.global_step >= self._step:
            extend_positions(kwargs["model"], self._extend.block_size, self._extend.rope.parameters)
            self._done = True

    on_train_begin = on_step_begin  # for a run that resumes after the extension


class EndWandbRun(TrainerCallback):
    """Callback that finishes the Weights & Biases run that training opened, so that the next one starts its own."""

    def __init__(self) -> None:
        """Note whether a run is already open."""
        import wandb

        self._wandb: Any = wandb
        self._is_ours = wandb.run is None

    def on_train_end(self, *_: object, **__: object) -> None:
        """Finish the run if training opened it."""
        if self._is_ours:
            self._wandb.finish()


class TokenProgressCallback(TrainerCallback):
    """Callback that updates a progress bar with the step, the last loss, and the density or the speed."""

    def __init__(self) -> None:
        """Start without a bar."""
        # progress bar, called after every step; does nothing until it is set
        self.bar: progress.Bar = progress.no_progress
        self._note = ""

    def on_train_begin(
        self, _args: object, state: TrainerState, _control: object, **_: object
    ) -> None:
        """Show the first step."""
        self.bar(state.global_step, state.max_steps)

    def on_step_end(
        self, _args: object, state: TrainerState, _control: object, **_: object
    ) -> None:
        """Show the step."""
        self.bar(state.global_step, state.max_steps, self._note)

    def on_log(
        self,
        _args: object,
        _state: object,
        _control: object,
        logs: Mapping[str, float] | None = None,
        **_: object,
    ) -> None:
        """Note the loss, and the density or the speed, for the bar."""
        if not logs or "loss" not in logs:
            return
        loss = f"loss {float(logs['loss']):.3f}"
        if "kl" in logs:
            loss += f" (NLL {logs['nll']:.3f}, KL {logs['kl']:.3g})"
        if "density" in logs:
            self._note = f"{loss}, density {logs['density']:.2f}"
        else:
            self._note = f"{loss}, {logs['tokens_per_second']:,.0f} tok/s"


def extend_positions(model: PreTrainedModel, length: int, rope: Mapping[str, Any]) -> None:
    """Extend a model in place to ``length`` positions, with the changes ``rope`` to its ``rope_parameters``.

    Its config is updated too. If layer kinds have separate RoPE settings, only those of full attention change, because
    windows see no farther than before. Raises ``UserError``: the model has no RoPE, or not of this kind.
    """
    extended = extended_config(model.config, length, rope)
    text = model.config.get_text_config()
    text.rope_parameters = extended.rope_parameters
    text.max_position_embeddings = extended.max_position_embeddings
    for name, module in list(model.named_modules()):
        has_config = isinstance(getattr(module, "config", None), PreTrainedConfig)
        if hasattr(module, "rope_type") and has_config:
            device = next(module.buffers()).device
            model.set_submodule(name, type(module)(module.config).to(device))


def extended_config(
    config: PreTrainedConfig, length: int, rope: Mapping[str, Any]
) -> PreTrainedConfig:
    """Return a copy of the text config with ``rope`` merged in, for at least ``length`` positions.

    Raises ``UserError``: the model has no RoPE, or not of this kind.
    """
    text = copy.deepcopy(config.get_text_config())
    current = getattr(text, "rope_parameters", None)
    if not current:
        raise UserError(
            f"models of type '{text.model_type}' have no rotary position embeddings (RoPE) to "
            "extend\n"
            "leave branch.extend out"
        )
    # Merge the settings, into those of global layers if each kind has its own
    positions = text.max_position_embeddings
    if isinstance(current.get(_GLOBAL), Mapping):
        changed = _changed(current[_GLOBAL], positions, length, rope)
        text.rope_parameters = {**current, _GLOBAL: changed}
    else:
        text.rope_parameters = _changed(current, positions, length, rope)
    text.max_position_embeddings = max(positions, length)
    # Let transformers validate the result
    try:
        text.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"branch.extend.rope: '{text.model_type}' does not support it: {first_line(error)}"
        ) from error
    return text


def _changed(
    current: Mapping[str, Any], positions: int, length: int, rope: Mapping[str, Any]
) -> dict[str, object]:
    """Merge ``rope`` into the RoPE settings of one layer kind, in a model of ``positions`` positions."""
    kind = rope.get("rope_type", current["rope_type"])
    if kind != current["rope_type"]:
        current = {key: current[key] for key in _OF_ALL_TYPES if key in current}
    merged = {**current, **rope, "rope_type": kind}
    if kind == "yarn":
        merged.setdefault("original_max_position_embeddings", positions)
    if kind in ("yarn", "linear"):
        original = merged.get("original_max_position_embeddings", positions)
        merged.setdefault("factor", max(1.0, length / original))
    return merged
