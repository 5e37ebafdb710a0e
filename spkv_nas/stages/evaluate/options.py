"""Declare the options that several evaluations share."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.base.flag import default
from spkv_nas.stages import flags
from spkv_nas.stages.options import REFERENCE, Measures

CHECKPOINT_TAU = "the checkpoint's"
RECIPE_NAME = "the checkpoint's recipe"  # default name of results


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Measures):
    """Options that name a checkpoint, its threshold, and a baseline."""

    model: flags.Model = REFERENCE
    tau: flags.Tau = default(None, CHECKPOINT_TAU)
    against: flags.Against = None
    name: flags.Name = default(None, RECIPE_NAME)


def check_checkpoints(options: CheckpointOptions) -> None:
    """Raise ``UserError`` unless both checkpoints exist and the threshold lies in [0, 1]."""
    from spkv_nas.evaluation.thresholds import check_tau
    from spkv_nas.model.source import check_checkpoint

    check_tau(options.tau)
    for source in (options.model, options.against):
        if source is not None:
            check_checkpoint(source)
