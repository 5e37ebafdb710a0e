"""Criterion ``tasks``: samples of lm-eval's tasks."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.contrib.evaluate.tasks.options import AllowCode, DataSets, Include
from spkv_nas.evaluation.verdict import criterion

TaskNames = Annotated[
    str | None,
    Flag("Comma-separated lm-eval tasks, such as stdlib_completions, which is built in."),
]


@dataclass(frozen=True)
class TaskSamples(criterion.Criterion):
    """Drop of the mean score over tasks."""

    name = "tasks"
    help = "drop of the mean score of lm-eval's tasks, in percentage points"
    title = "Downstream tasks"
    noun = "samples"
    reads_text = False
    test = criterion.MeanDrop()

    names: TaskNames = None
    data_sets: DataSets = default(None, "the Hub or its cache")
    include: Include = None
    allow_code: AllowCode = False

    def check(self) -> None:
        """Check that tasks are named and that their folders exist."""
        from spkv_nas.stages.checks import check_exist

        if self.names is None:
            raise UserError(
                "--margin tasks=... needs names, comma-separated lm-eval tasks, such as "
                "tasks=2:names=hellaswag,gsm8k"
            )
        check_exist(self.include or (), "folder of tasks")

    def prepare(self, setting: criterion.Setting) -> criterion.Rounds:
        """Return the samples of the tasks, each of a random task."""
        from spkv_nas.contrib.evaluate.tasks import stage, suite

        if not setting.reporter.verbose:
            suite.quiet_libraries()
        setting.reporter.announce("loading tasks and their data")
        folders = self.include or [], self.data_sets or []
        caution = setting.reporter.caution
        groups = suite.load_suite(
            str(self.names), *folders, allow_code=self.allow_code, caution=caution
        )
        return stage.TaskRounds(
            groups, setting.tokenizer, seed=setting.seed, allow_code=self.allow_code
        )


TASKS = TaskSamples()
