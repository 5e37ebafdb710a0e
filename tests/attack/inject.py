"""Inject non-finite numbers into a training in the forked child, and trace its steps.

Everything hooks into ``transformers.Trainer``, which the product's trainer calls, so that the product itself stays as
it is.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

KINDS = ("loss", "gradient", "weight", "moment", "update", "learning-rate", "predictor")


def shrink_palindrome() -> None:
    """Reduce held-out sequences, which dominate a short comparison's time, and write checkpoints in its few steps."""
    from spkv_nas.contrib.reproduce.palindrome import stage

    names = list(stage.PalindromeSettings.__dataclass_fields__)
    initialise = stage.PalindromeSettings.__init__
    index = names.index("num_heldout")
    values = initialise.__defaults__ or ()
    initialise.__defaults__ = (*values[:index], 16, *values[index + 1 :])
    stage.SAVE_STEPS = 2


def _callback(make: Any) -> None:
    """Add a callback, ``make()``, to every trainer created from now on."""
    import transformers

    original = transformers.Trainer.__init__

    def with_callback(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.add_callback(make())

    transformers.Trainer.__init__ = with_callback


def trace(file: Path) -> None:
    """Append a line to ``file`` at both ends of a training and of its steps: event, step, number of steps, folder."""
    from transformers import TrainerCallback

    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(what: str) -> Any:
        def event(self: object, args: Any, state: Any, control: Any, **_: Any) -> None:
            os.write(
                descriptor,
                f"{what}\t{state.global_step}\t{state.max_steps}\t{args.output_dir}\n".encode(),
            )

        return event

    names = {
        "on_train_begin": "begin",
        "on_step_begin": "step",
        "on_step_end": "stepped",
        "on_train_end": "end",
    }
    _callback(type("Trace", (TrainerCallback,), {name: note(what) for name, what in names.items()}))


def inject(kind: str, run: str, step: int, value: str) -> None:
    """Make one number of a training non-finite, once.

    Args:
        kind: of ``KINDS``; "update": a gradient that the check of its norm cannot see any more.
        run: a text in the name of the run's folder, such as "sp-kv-".
        step: the step (from 0) whose number it is; a weight becomes wrong when the step has been made.
        value: such as "nan".
    """
    import transformers
    from torch import nn

    number = float(value)

    def is_now(self: Any) -> bool:
        return run in str(self.args.output_dir) and self.state.global_step == step

    def some(model: nn.Module, where: str = "") -> nn.Parameter:
        return next(
            p
            for name, p in model.named_parameters()
            if where in name and p.requires_grad and p.ndim == 2
        )

    if kind == "loss":
        loss = transformers.Trainer.compute_loss

        def wrong_loss(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = loss(self, model, *args, **kwargs)
            if not (model.training and is_now(self)):
                return result
            return (
                (result[0] * number, *result[1:]) if isinstance(result, tuple) else result * number
            )

        transformers.Trainer.compute_loss = wrong_loss
    elif kind == "gradient":
        work = transformers.Trainer.training_step

        def wrong_gradient(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = work(self, model, *args, **kwargs)
            if is_now(self):
                some(model).grad.view(-1)[3] = number
            return result

        transformers.Trainer.training_step = wrong_gradient
    else:
        _callback(lambda: _in_step(kind, run, step, number, some))


def _in_step(kind: str, run: str, step: int, number: float, some: Any) -> Any:
    from transformers import TrainerCallback

    class Wrong(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if run not in args.output_dir or state.global_step != step:
                return
            if kind == "update":
                some(kwargs["model"]).grad.view(-1)[3] = number
            elif kind == "learning-rate":
                for group in kwargs["optimizer"].param_groups:
                    group["lr"] = 1e39 if math.isfinite(number) else number

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if run not in args.output_dir or state.global_step != step:
                return
            model, optimizer = kwargs["model"], kwargs["optimizer"]
            if kind == "weight":
                some(model).data.view(-1)[3] = number
            elif kind == "predictor":
                some(model, "utility_predictor").data.view(-1)[3] = number
            elif kind == "moment":
                next(iter(optimizer.state.values()))["exp_avg"].view(-1)[0] = number

    return Wrong()
