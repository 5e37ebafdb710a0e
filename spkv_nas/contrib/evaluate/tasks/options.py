"""Declare the options of the ``evaluate tasks`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_WHOLE
from spkv_nas.stages.commands import Command, runner
from spkv_nas.stages.options import CheckpointOptions

Names = Annotated[
    list[str],
    Flag(
        "lm-eval tasks; paper: the sixteen tasks of the SP-KV paper; stdlib_completions is built "
        "in.",
        metavar="TASK",
        argument=True,
    ),
]
DataSets = Annotated[
    list[str] | None,
    Flag(
        "Folder with local copies of data sets, named by their Hub IDs; repeat for several.",
        metavar="FOLDER",
    ),
]
Include = Annotated[
    list[str] | None,
    Flag(
        "Folder with YAML task definitions, whose Python code is run; repeat for several.",
        metavar="FOLDER",
    ),
]
AllowCode = Annotated[
    bool,
    Flag("Allow tasks such as mbpp to run model-written code on this machine.", ("--allow-code",)),
]
Limit = Annotated[
    int | None, Flag("Evaluate only the first N samples of each task.", low=1, high=MAX_WHOLE)
]


@dataclass(frozen=True, kw_only=True)
class TasksOptions(CheckpointOptions):
    """Run downstream tasks of lm-eval. Writes reports/NAME/tasks.csv.

    With --against, another checkpoint answers the same samples. Samples are kept in runs/NAME/tasks/ and reused.
    """

    names: Names
    data_sets: DataSets = default(None, "the Hub or its cache")
    include: Include = None
    limit: Limit = default(None, "all")
    allow_code: AllowCode = False


def check(options: TasksOptions) -> None:
    """Check the folders."""
    from spkv_nas.stages.checks import check_exist

    check_exist(options.include or (), "folder of tasks")


TASKS = Command("tasks", runner(TasksOptions), distributed=True)
