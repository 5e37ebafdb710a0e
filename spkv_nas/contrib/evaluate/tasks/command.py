"""Run the ``evaluate tasks`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.contrib.evaluate.tasks.options import TasksOptions
from spkv_nas.stages.evaluate.evaluation import Evaluation
from spkv_nas.stages.result import Result


def tasks(options: TasksOptions, reporter: Reporter) -> Result:
    """Run downstream tasks of lm-eval. Writes reports/NAME/tasks.csv.

    With --against, another checkpoint answers the same samples. Samples are kept in runs/NAME/tasks/ and reused.
    """
    from spkv_nas.contrib.evaluate.tasks import stage

    return Result(stage.tasks(options, reporter), stage.show)


TASKS = Evaluation("tasks", tasks, distributed=True)
