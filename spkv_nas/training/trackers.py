"""Experiment trackers: those of ``transformers.Trainer``, by the names that a recipe's ``report_to`` has for them."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

from transformers import TrainerCallback

from spkv_nas.base.errors import UserError
from spkv_nas.base.extras import EXTRAS

WANDB = "wandb"


def check_trackers(names: Collection[str]) -> None:
    """Raise ``UserError`` for a tracker that is not installed: its package has its name."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, as W&B leaves behind, is no package
            wanted = f"'spkv-nas[{name}]'" if name in EXTRAS else name
            raise UserError(f"report_to: {name} is not installed\npip install {wanted} brings it, or leave it out")


class EndWandbRun(TrainerCallback):
    """Ends a run's part in Weights & Biases, which the library leaves open: the process's next run would go on with it.

    A run that was open before, of the caller's own, stays so.
    """

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._is_ours = wandb.run is None

    def on_train_end(self, *_: object, **__: object) -> None:
        if self._is_ours:
            self._wandb.finish()
