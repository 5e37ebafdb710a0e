"""Experiment trackers of ``transformers.Trainer``, by their names in a recipe's ``report_to``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transformers import TrainerCallback

from spkv_nas.base.extras import check_installed

WANDB = "wandb"


def check_trackers(names: Collection[str]) -> None:
    """Raise ``UserError`` if a tracker's package, which has the tracker's name, is not installed."""
    for name in names:
        check_installed(name, "report_to")


class EndWandbRun(TrainerCallback):
    """Callback that finishes the Weights & Biases run when training ends, so that the next training starts a new one.

    A run that the caller had opened before stays open.
    """

    def __init__(self) -> None:
        """Note whether a run is already open."""
        import wandb

        self._wandb: Any = wandb
        self._is_ours = wandb.run is None

    def on_train_end(self, *_: object, **__: object) -> None:
        """Finish the run if training opened it."""
        if self._is_ours:
            self._wandb.finish()
