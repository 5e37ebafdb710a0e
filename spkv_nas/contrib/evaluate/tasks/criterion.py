"""Criterion ``tasks``: samples of lm-eval's tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spkv_nas.base.errors import UserError
from spkv_nas.evaluation.verdict.paired_test import MeanDrop
from spkv_nas.stages.verdict.criterion import Criterion, Setting
from spkv_nas.stages.verdict.options import VerdictOptions

if TYPE_CHECKING:
    from spkv_nas.evaluation.verdict.rounds import Rounds


def _samples(setting: Setting) -> Rounds:
    """Return the samples of the tasks, each of a random task."""
    from spkv_nas.contrib.evaluate.tasks.rounds import TaskRounds
    from spkv_nas.contrib.evaluate.tasks.suite import load_suite, quiet_libraries

    options, reporter = setting.options, setting.reporter
    if not reporter.verbose:
        quiet_libraries()
    reporter.announce("loading tasks and their data")
    suite = load_suite(
        str(options.lm_tasks),
        options.include or [],
        options.data_sets or [],
        allow_code=options.allow_code,
        caution=reporter.caution,
    )
    return TaskRounds(suite, setting.tokenizer, seed=options.seed, allow_code=options.allow_code)


def _check_tasks(options: VerdictOptions) -> None:
    """Check that tasks are named and that their folders exist."""
    from spkv_nas.stages.checks import check_exist

    if options.lm_tasks is None:
        raise UserError("--margin tasks=... needs --lm-tasks: comma-separated lm-eval tasks, such as hellaswag,gsm8k")
    check_exist(options.include or (), "folder of tasks")


TASKS = Criterion("tasks", "samples", MeanDrop(), _samples, _check_tasks, reads_text=False)
