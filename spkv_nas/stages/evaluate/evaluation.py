"""Describe an evaluation, a subcommand of ``evaluate``, and the options that several of them share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spkv_nas.base import flag, progress
from spkv_nas.evaluation.thresholds import check_tau
from spkv_nas.model.source import check_checkpoint
from spkv_nas.stages import commands, flags
from spkv_nas.stages.options import REFERENCE, Measures


@dataclass(frozen=True)
class Evaluation:
    """Subcommand of ``evaluate``; ``distributed`` if several processes of torchrun can share the work.

    The first parameter of ``run`` is annotated with a dataclass whose fields become the options, and its docstring is
    the help. A function ``check`` beside that dataclass checks the options first.
    """

    name: str
    run: Callable[[Any, progress.Reporter], commands.Results | None]
    distributed: bool = False


CHECKPOINT_TAU = "the checkpoint's"
RECIPE_NAME = "the checkpoint's recipe"  # default name of results


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Measures):
    """Options that name a checkpoint, its threshold, and a baseline."""

    model: flags.Model = REFERENCE
    tau: flags.Tau = flag.default(None, CHECKPOINT_TAU)
    against: flags.Against = None
    name: flags.Name = flag.default(None, RECIPE_NAME)


def check_checkpoints(options: CheckpointOptions) -> None:
    """Raise ``UserError`` unless both checkpoints exist and the threshold lies in [0, 1]."""
    check_tau(options.tau)
    for source in (options.model, options.against):
        if source is not None:
            check_checkpoint(source)
