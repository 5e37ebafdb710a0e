"""What happens around the steps of a training run: gate phases, longer blocks, evaluations, progress, an early end."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from spkv_nas.base.distributed import num_processes, sum_over_processes
from spkv_nas.base.interrupt import Pending
from spkv_nas.base.progress import Bar, no_progress
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.sweep import evaluate
from spkv_nas.model.density_tracker import DensityTracker
from spkv_nas.model.gates import predictor_parameters
from spkv_nas.model.modes import gate_mode, set_gate_mode, set_price
from spkv_nas.model.price import KeyBenefitEstimator, Price
from spkv_nas.model.rope import extend_positions
from spkv_nas.training.extension import Extension
from spkv_nas.training.phases import GateSchedule
from spkv_nas.training.recipe import GatesConfig
from spkv_nas.training.sharding import spare_passes


class InterruptCallback(TrainerCallback):
    """Ends training after the step in which a signal came to any process, with a checkpoint of that step."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self.ended = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        asked = torch.tensor(float(self._pending.number is not None))
        self.ended = bool(sum_over_processes(asked) > 0)  # all processes stop at the same step
        if self.ended:
            control.should_save = control.should_training_stop = True


class LogCallback(TrainerCallback, ExportableState):
    """Keeps with a checkpoint the loss since the last line of the log, so that the next is a mean over the same steps.

    Attributes:
        total: sum of the losses of the steps after ``since``, mean over processes.
        since: step of the last line.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.total, self.since = 0.0, 0

    def take(self) -> None:
        """Note what the trainer has now; collective."""
        self.total = float(sum_over_processes(self._trainer._tr_loss)) / num_processes()
        self.since = int(self._trainer._globalstep_last_logged)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this."""
        return {"args": {}, "attributes": {"total": self.total, "since": self.since}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        known = state.stateful_callbacks.setdefault(type(self).__name__, self.state())  # the first version has none
        if state.global_step and (saved := known["attributes"])["since"] <= state.global_step:
            self._trainer._tr_loss = torch.tensor(saved["total"], device=args.device)
            self._trainer._globalstep_last_logged = saved["since"]


class GatePhaseCallback(TrainerCallback, ExportableState):
    """Sets the gate mode of each step, measures its density, and moves the price of keys toward a target density.

    A frozen predictor takes part in no update. The price is saved with the trainer's state, so a resumed run agrees.
    Processes sample their gates independently, and agree on density and price.

    Attributes:
        density: [layers, KV heads] of the last measured step, None before.
    """

    def __init__(self, schedule: GateSchedule, options: GatesConfig) -> None:
        self._schedule, self._options = schedule, options
        self._watch: DensityTracker | None = None
        self.density: NDArray[np.float64] | None = None
        self._moved = None if options.target_density is None else Price(options.target_density)
        self._benefits: KeyBenefitEstimator | None = None

    @property
    def price(self) -> float:
        """Of the next step: the recipe's, or as the target density has moved it."""
        return self._options.price if self._moved is None else self._moved.value

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this."""
        return {"args": {}, "attributes": {"price": None if self._moved is None else self._moved.state()}}

    def frozen(self, step: int) -> bool:
        """Whether predictors are frozen in a step."""
        return self._schedule.at(step).frozen

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._watch = DensityTracker(kwargs["model"])
        if args.process_index:  # all were seeded alike, and the data's order is drawn; a checkpoint restores its own
            torch.manual_seed(args.seed + args.process_index)
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved and self._moved is not None and (known := saved["attributes"].get("price")):
            self._moved.restore(known)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._watch is not None
        phase, options = self._schedule.at(state.global_step), self._options
        set_gate_mode(kwargs["model"], phase.mode, options.tau, anneal=phase.anneal, p_min=options.p_min)
        set_price(kwargs["model"], 0.0 if phase.frozen else self.price / args.gradient_accumulation_steps)
        if self._moved is not None or (state.global_step + 1) % args.logging_steps == 0:
            self._watch.start()
        if self._moved is not None and not self._moved.is_measured and not phase.frozen:
            self._benefits = KeyBenefitEstimator(kwargs["model"])

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._watch is not None
        measured = self._watch.stop()
        if measured is not None:
            self.density = measured
        if self._benefits is not None and self._moved is not None:
            self._moved.begin(sum_over_processes(self._benefits.stop()) / num_processes())
            self._benefits = None
        if self.frozen(state.global_step):
            for parameter in predictor_parameters(kwargs["model"]):
                parameter.grad = None
        elif self._moved is not None and measured is not None:
            self._moved.move(float(np.nanmean(measured)), kwargs["optimizer"].param_groups[0]["lr"])


class ExtensionCallback(TrainerCallback):
    """Gives the model its longer positions before the first step that needs them, and where a run resumes after it."""

    def __init__(self, extension: Extension) -> None:
        self._extension, self._done = extension, False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.on_step_begin(args, state, control, **kwargs)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._done and state.global_step >= self._extension.step:
            extend_positions(kwargs["model"], self._extension.block_size, self._extension.rope)
            self._done = True


class HeldoutCallback(TrainerCallback):
    """Every so many steps: held-out NLL with soft and with hard gates, and the density of the hard ones."""

    def __init__(self, trainer: Trainer, blocks: TokenBlocks, every: int) -> None:
        self._trainer, self._blocks, self._every = trainer, blocks, every

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self._every:
            return
        self._trainer.check_finite()  # an evaluation could not say in which step it began
        model, size = kwargs["model"], args.per_device_train_batch_size
        with gate_mode(model, "soft"):
            spare_passes(model, self._blocks, size)
            soft = document_nll(model, self._blocks, batch_size=size)
        spare_passes(model, self._blocks, size)
        hard = evaluate(model, self._blocks, batch_size=size)
        assert hard.density is not None
        should_log = control.should_log  # the step's own loss, which logging anything else would cancel
        self._trainer.log(
            {"heldout_soft_nll": soft.mean, "heldout_hard_nll": hard.nll.mean, "heldout_density": hard.density}
        )
        control.should_log = should_log


class TokenProgressCallback(TrainerCallback):
    """Tells a bar the steps done, and what fits of the last line of the log: the loss, and the density or the speed.

    Attributes:
        bar: told of every step; set while it is shown.
    """

    def __init__(self) -> None:
        self.bar: Bar = no_progress
        self._note = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar(state.global_step, state.max_steps, self._note)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            gated = "density" in logs
            other = f"density {logs['density']:.2f}" if gated else f"{logs['tokens_per_second']:,.0f} tok/s"
            self._note = f"loss {float(logs['loss']):.3f}, {other}"
