"""Evaluate a checkpoint on downstream tasks, to ``reports/<name>/``, alone or beside another one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from spkv_nas.artifacts.result_tables import TASKS
from spkv_nas.base.distributed import on_main
from spkv_nas.base.progress import SILENT, Bar, Reporter
from spkv_nas.base.version import environment
from spkv_nas.stages.checks import check
from spkv_nas.stages.common import quiet_transformers, result_name
from spkv_nas.stages.eval_modes import hard, identity, load, origin
from spkv_nas.stages.options import EvaluateOptions

if TYPE_CHECKING:
    from spkv_nas.evaluation.tasks.run import Found
    from spkv_nas.evaluation.tasks.suite import Asked


@dataclass(frozen=True)
class TasksResult:
    """What the tasks gave: their name, the table of ``evaluation.tasks``, and its folder and that of all samples."""

    name: str
    rows: pd.DataFrame
    folder: Path
    samples: Path


def tasks(options: EvaluateOptions, reporter: Reporter = SILENT) -> TasksResult:
    """Values of a checkpoint on tasks, written to ``reports/<name>/tasks.csv``, every sample to ``runs/<name>/tasks/``.

    Raises:
        UserError: options that do not go together, a task that is not there, without data, or without room, or what
            cannot be loaded.
    """
    check(options)
    from spkv_nas.evaluation.tasks.suite import code_allowed, load_suite
    from spkv_nas.evaluation.tasks.table import Results, tasks_table

    _quiet(reporter)
    assert options.model is not None
    assert options.tasks is not None
    name = options.name or result_name(options.model)
    folder, samples = options.place.report_dir(name), options.place.run_dir(name) / "tasks"
    reporter.announce("reading tasks and their data")
    with code_allowed(options.allow_code):
        suite = load_suite(
            options.tasks, options.include or [], options.data or [], allow_code=options.allow_code,
            caution=reporter.caution,
        )  # fmt: skip
        sources = [(options.model, options.tau), *([(options.against, None)] if options.against else [])]
        taken = [_take(options, source, tau, suite, samples, reporter) for source, tau in sources]
    found = list(zip(*(one for one, _ in taken), strict=True))
    rows = tasks_table([Results(asked, *by_model) for asked, by_model in zip(suite, found, strict=True)])
    (_, own), *others = taken
    told = {
        **own,
        "against": others[0][1] if others else None,
        "tasks": [asked.name for asked in suite],
        "limit": options.limit,
        "environment": {**environment(), "lm-eval": version("lm-eval")},
    }
    on_main(lambda: TASKS.write(folder, rows, told))
    return TasksResult(name, rows, folder, samples)


def _take(
    options: EvaluateOptions, source: str, tau: float | None, suite: Sequence[Asked], samples: Path, reporter: Reporter
) -> tuple[list[list[Found]], dict[str, Any]]:
    """What one checkpoint gives to every task of every name, and where that comes from; what is finished is read."""
    from spkv_nas.evaluation.tasks.language_model import CheckpointLM
    from spkv_nas.evaluation.tasks.run import run_task

    loaded = model, _ = load(options, source, reporter)
    about = origin(source, model, tau)
    whose = identity(source, loaded, f"{about['tau']} lm-eval {version('lm-eval')}")
    number = sum(len(asked.tasks) for asked in suite)
    found: list[list[Found]] = []
    with hard(model, tau), reporter.bar("answering") as bar:
        lm = CheckpointLM(*loaded)
        for asked in suite:
            found.append([])
            for task in asked.tasks:
                done = sum(map(len, found))
                lm.progress = _share(bar, done, number, task.task_name)
                found[-1].append(run_task(lm, task, samples, whose, limit=options.limit, allow_code=options.allow_code))
    kept = sum(one.was_kept for each in found for one in each)
    reporter.reused(kept, number, "tasks")
    return found, about


def _share(bar: Bar, task: int, number: int, name: str) -> Any:
    """A ``Progress`` of one task among ``number``, each as long a part of the bar."""
    return lambda done, total: bar(round(1000 * (task + done / total)), 1000 * number, name)


def _quiet(reporter: Reporter) -> None:
    """As ``quiet_transformers``, and lm-eval and its data sets too."""
    import datasets

    quiet_transformers(reporter)
    if not reporter.verbose:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        datasets.disable_progress_bars()
