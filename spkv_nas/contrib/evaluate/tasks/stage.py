"""Evaluate a checkpoint on downstream tasks, alone or beside a second one, to ``reports/<name>/``."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.result_tables import TASKS
from spkv_nas.base import console, distributed, progress
from spkv_nas.base.version import environment
from spkv_nas.contrib.evaluate.samples import Checkpoint, SampledTable, percent, say_sample_count, with_error
from spkv_nas.contrib.evaluate.tasks.options import TasksOptions
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages import checks, printing, sized_model
from spkv_nas.stages.result import Result

if TYPE_CHECKING:
    from spkv_nas.contrib.evaluate.tasks.run import TaskResult
    from spkv_nas.contrib.evaluate.tasks.suite import SelectedTasks


def run(options: TasksOptions, reporter: progress.Reporter = progress.SILENT) -> Result:
    """Evaluate a checkpoint on downstream tasks: ``reports/<name>/tasks.csv``, with every sample in ``runs/``."""
    checks.check(options)
    from spkv_nas.contrib.evaluate.tasks.run import Results, tasks_table
    from spkv_nas.contrib.evaluate.tasks.suite import code_allowed, load_suite, quiet_libraries

    quiet_transformers(reporter)
    if not reporter.verbose:
        quiet_libraries()
    name = options.name or sized_model.result_name(options.model, options.folders)
    folder, samples = options.folders.report_dir(name), options.folders.run_dir(name) / "tasks"
    # Run the tasks on every checkpoint
    reporter.announce("loading tasks and their data")
    with code_allowed(options.allow_code):
        names, folders = ",".join(options.names), (options.include or [], options.data_sets or [])
        suite = load_suite(names, *folders, allow_code=options.allow_code, caution=reporter.caution)
        sources = [(options.model, options.tau), *([(options.against, None)] if options.against else [])]
        by_checkpoint = [_run_tasks(options, *source, suite, samples, reporter) for source in sources]
    results, origins = zip(*by_checkpoint, strict=True)
    # Write the table with its origin
    rows = tasks_table([Results(group, *by_model) for group, *by_model in zip(suite, *results, strict=True)])
    record = {
        **origins[0],
        "against": origins[1] if options.against else None,
        "tasks": [group.name for group in suite],
        "limit": options.limit,
        "environment": {**environment(), "lm-eval": version("lm-eval")},
    }
    distributed.on_main(lambda: TASKS.write(folder, rows, record, reporter))
    return Result(SampledTable(name, rows, folder, samples), show)


def _run_tasks(
    options: TasksOptions,
    source: str,
    tau: float | None,
    suite: "Sequence[SelectedTasks]",
    samples: Path,
    reporter: progress.Reporter,
) -> "tuple[list[list[TaskResult]], dict[str, Any]]":
    """Run every task on one checkpoint, reusing finished ones; return results by requested name, and the origin."""
    from spkv_nas.contrib.evaluate.tasks import language_model, run

    checkpoint = Checkpoint.load(options, source, tau, reporter)
    identity = checkpoint.identity(f"{checkpoint.origin['tau']} lm-eval {version('lm-eval')}")
    num_tasks = sum(len(group.tasks) for group in suite)
    results: list[list[TaskResult]] = []
    with checkpoint.hard(), reporter.bar("answering") as bar:
        lm = language_model.CheckpointLM(checkpoint.model, checkpoint.tokenizer)
        for group in suite:
            results.append([])
            for task in group.tasks:
                lm.progress = progress.part_of(bar, sum(map(len, results)), num_tasks, task.task_name)
                results[-1].append(
                    run.run_task(lm, task, samples, identity, limit=options.limit, allow_code=options.allow_code)
                )
    num_reused = sum(result.was_kept for group_results in results for result in group_results)
    reporter.reused(num_reused, num_tasks, "tasks")
    return results, checkpoint.origin


def show(result: SampledTable) -> None:
    """Print every task by metric, with the other checkpoint if there is one."""
    against = result.rows["against"].notna().any()
    pair_columns = ["against", "density %", "difference"] if against else []
    grid = console.Table(
        "task", "metric", "shots", "value", "density %", *pair_columns, title=console.escape(result.name)
    )
    for row in result.rows.itertuples():
        shots = "-" if row.num_fewshot != row.num_fewshot else f"{row.num_fewshot:g}"
        value = with_error(row.value, row.standard_error)
        cells = [console.escape(row.task), console.escape(row.metric), shots, value, percent(row.density)]
        if against:
            difference = printing.change(row.difference, row.difference_standard_error)
            cells += [with_error(row.against), percent(row.against_density), difference]
        grid.add_row(*cells)
    console.out.print(grid)
    say_sample_count(result.rows["num_samples"], "samples per task")
    console.print_path("values", result.folder / "tasks.csv")
    console.print_path("samples", result.samples)
