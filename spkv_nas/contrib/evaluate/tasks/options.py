"""Declare the options of the ``evaluate tasks`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_WHOLE
from spkv_nas.stages import flags
from spkv_nas.stages.evaluate.options import CheckpointOptions, check_checkpoints

Names = Annotated[
    list[str],
    Flag(
        "lm-eval tasks; paper: the sixteen tasks of the SP-KV paper; stdlib_completions is built in.", metavar="TASK",
        argument=True,
    ),
]  # fmt: skip
Limit = Annotated[int | None, Flag("Evaluate only the first N samples of each task.", low=1, high=MAX_WHOLE)]


@dataclass(frozen=True, kw_only=True)
class TasksOptions(CheckpointOptions):
    """Options of the ``evaluate tasks`` command."""

    names: Names
    data_sets: flags.DataSets = default(None, "the Hub or its cache")
    include: flags.Include = None
    limit: Limit = default(None, "all")
    allow_code: flags.AllowCode = False


def check(options: TasksOptions) -> None:
    """Check the threshold, the checkpoints and the folders."""
    from spkv_nas.stages.checks import check_exist

    check_checkpoints(options)
    check_exist(options.include or (), "folder of tasks")
