"""Experiment trackers: those of ``transformers.Trainer``, by the names that a recipe's ``report_to`` has for them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transformers import TrainerCallback

from spkv_nas.base.extras import check_installed

WANDB = "wandb"


def check_trackers(names: Collection[str]) -> None:
    """Raise ``UserError`` for a tracker that is not installed: its package has its name."""
    for name in names:
        check_installed(name, "report_to")


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
