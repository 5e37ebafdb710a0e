"""Evaluate a checkpoint on downstream tasks, alone or beside a second one, to ``reports/<name>/``.

A finished task is a file (``evaluate.samples``): a header with the density, then every sample. Its name depends on
the checkpoint and its gates, on the requests, and on the task's config, so that the next run reuses the answers.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from lm_eval import defaults, evaluator, utils
from lm_eval.api import task as tasks_module
from lm_eval.api.metrics import mean
from lm_eval.api.task import Task
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.result_tables import TASKS
from spkv_nas.base import console, distributed, errors, progress, statistics
from spkv_nas.contrib.evaluate import samples
from spkv_nas.contrib.evaluate.tasks import suite
from spkv_nas.contrib.evaluate.tasks.language_model import CheckpointLM
from spkv_nas.contrib.evaluate.tasks.options import TasksOptions
from spkv_nas.evaluation.verdict import criterion
from spkv_nas.model import loss
from spkv_nas.stages import commands, printing, sized_model

# Config keys left out of the hash, as the requests contain their effect
_OF_PLACES = ("metadata", "dataset_path", "dataset_kwargs")
_KEPT = ("doc_id", "filter", "target", "resps", "filtered_resps")  # keys kept of lm-eval's samples

Cell = tuple[float, ...]  # columns of ``TASKS`` from "num_samples" on
_STREAM = 36  # separates the order of a verdict's samples from other uses of the seed
_RESAMPLES = 200  # bootstrap resamples for the error of metrics that are not means over samples


@dataclass(frozen=True)
class TaskResult:
    """Results of a checkpoint on a task: values of each metric by sample, with the density over all real tokens.

    A metric is named ``exact_match (strict-match)`` if the task has several filters; ``wholes`` has the aggregation
    function of those that are not averaged. ``was_kept`` tells that the answers come from an earlier run.
    """

    values: dict[str, list[Any]]
    density: float
    wholes: dict[str, Callable[[list[Any]], float]] = field(default_factory=dict)
    was_kept: bool = False


def run_task(
    lm: CheckpointLM,
    task: Task,
    folder: Path,
    identity: str,
    *,
    limit: int | None = None,
    allow_code: bool = False,
) -> TaskResult:
    """Run the first ``limit`` samples of a task, or read its cached answers; must be called on all ranks."""
    was_kept = True
    name = task.task_name

    def answer() -> list[dict[str, Any]]:
        """Return a header, and every sample."""
        nonlocal was_kept
        was_kept = False
        lm.start()
        results = _ask(lm, task, allow_code, limit=limit)
        header = {"task": name, "num_fewshot": task.get_config("num_fewshot"), "density": lm.stop()}
        return [header, *map(_sample, results["samples"][name])]

    # Build the requests, which the file name depends on, and answer them unless an earlier run has
    with _requests_built(task, limit=limit):
        content = _content(task, identity)
        header, *rows = samples.kept_samples(
            folder, name, content, answer, utils.handle_non_serializable
        )
    # Collect the values of every metric, by filter if there are several
    has_filters = len({sample["filter"] for sample in rows}) > 1
    values: dict[str, list[Any]] = {}
    wholes = {}
    for sample in rows:
        for metric, value in sample["metrics"].items():
            label = f"{metric} ({sample['filter']})" if has_filters else metric
            values.setdefault(label, []).append(value)
            aggregate = task.aggregation().get(metric, mean)
            if aggregate is not mean:
                wholes[label] = aggregate
    return TaskResult(values, header["density"], wholes, was_kept)


def score_documents(
    lm: CheckpointLM, task: Task, documents: Sequence[int], *, seed: int, allow_code: bool = False
) -> list[float]:
    """Return the score in [0, 1] of some documents of a task, by index, without reading or writing files.

    The score is the first metric of the task's first filter, which must be a mean, of which more is better. ``seed``,
    of few-shot examples and of sampling, must differ between calls.
    """
    name = task.task_name
    ordered = sorted(documents)
    # Answer the documents
    with _requests_built(task, seed, samples=ordered):
        results = _ask(lm, task, allow_code, samples={name: ordered})
    # Select the first metric of the first filter
    rows = results["samples"][name]
    first = rows[0]["filter"]
    metric = rows[0]["metrics"][0]
    scores = {sample["doc_id"]: sample[metric] for sample in rows if sample["filter"] == first}
    # Check that a mean of these scores is what the task reports
    is_mean = task.aggregation().get(metric, mean) is mean
    is_score = task.higher_is_better().get(metric, True) and all(
        isinstance(score, int | float) and 0.0 <= score <= 1.0 for score in scores.values()
    )
    if not is_mean or not is_score:
        raise errors.UserError(
            f"task {name}: its first metric, {metric}, is no mean of scores from 0 to 1 by "
            "sample, so it allows no verdict\n"
            "leave the task out, or choose another metric in your own YAML file of the task"
        )
    return [float(scores[document]) for document in documents]


def _ask(lm: CheckpointLM, task: Task, allow_code: bool, **selection: Any) -> dict[str, Any]:
    """Return lm-eval's results of a task, whose requests have been built; ``selection`` is that of its samples."""
    results: dict[str, Any] = evaluator.evaluate(
        lm,
        {"tasks": {task.task_name: task}},
        bootstrap_iters=0,
        confirm_run_unsafe_code=allow_code,
        **selection,
    )
    return results


def task_identity(task: Task) -> str:
    """Return a text of everything that the scores of ``score_documents`` depend on besides model and seed."""
    config = {key: value for key, value in task.dump_config().items() if key not in _OF_PLACES}
    examples = list(task.fewshot_docs()) if config.get("num_fewshot") else []
    return json.dumps([config, list(task.eval_docs), examples], sort_keys=True, default=_named)


def _content(task: Task, identity: str) -> str:
    """Return a text of everything that the answers to a task, and their scores, depend on."""
    config = {key: value for key, value in task.dump_config().items() if key not in _OF_PLACES}
    requests = [[instance.request_type, instance.args] for instance in task.instances]
    return json.dumps(
        [identity, config, requests, defaults.DEFAULT_OTHER_SEED], sort_keys=True, default=_named
    )


def _named(value: Any) -> str:
    """Represent a function by its name instead of its address in memory."""
    return str(getattr(value, "__qualname__", None) or value)


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a sample: its prompt once, and the continuation of each request."""
    prompt, *_ = sample["arguments"][0]
    return {
        **{key: sample[key] for key in _KEPT},
        "prompt": prompt,
        "asked": [request[1:] for request in sample["arguments"]],
        "metrics": {metric: sample[metric] for metric in sample["metrics"]},
    }


@contextmanager
def _requests_built(task: Task, seed: int | None = None, **documents: Any) -> Iterator[None]:
    """Build a task's requests as lm-eval's ``simple_evaluate`` does; ``evaluate`` asks them while this is open.

    All random generators are seeded first, so that few-shot examples and sampled answers depend on nothing before.
    """
    task.set_fewshot_seed(seed=defaults.DEFAULT_OTHER_SEED if seed is None else seed)
    suite.seed_generators(seed)
    # Build them without lm-eval's progress bar
    with loss.replaced(tasks_module, "tqdm", partial(tasks_module.tqdm, disable=True)):
        task.build_all_requests(rank=0, world_size=1, **documents)
    # Building them again would draw other few-shot examples
    with loss.replaced(task, "build_all_requests", lambda **_: None):
        yield


@dataclass(frozen=True)
class Results:
    """Task results for one name, in the order of its tasks, of a checkpoint and optionally of another."""

    selected: suite.SelectedTasks
    results: Sequence[TaskResult]
    against: Sequence[TaskResult] | None = None

    def cells(self) -> list[tuple[str, Cell]]:
        """Return (metric, mean over the tasks) of each metric that the name reports."""
        others: Sequence[TaskResult | None] = self.against or [None] * len(self.results)
        cells = []
        for metric in self.results[0].values:
            if self.selected.metrics and metric.partition(" (")[0] not in self.selected.metrics:
                continue
            tasks = [
                _cell(metric, result, other)
                for result, other in zip(self.results, others, strict=True)
            ]
            cells.append((metric, _mean(tasks, by_size=self.selected.by_size)))
        return cells


def tasks_table(results: Sequence[Results]) -> pd.DataFrame:
    """Return one row per metric of each name, columns of ``TASKS``, and an average over several names.

    The average is over the first metric of each name, if it is a mean over samples. A group averages its tasks,
    weighted by samples where lm-eval defines it so. ``difference`` is the checkpoint's value minus that of the other
    checkpoint, with the error of the difference by sample; NaN without another checkpoint, or for a single sample.
    """
    rows: list[tuple[Any, ...]] = []
    firsts = []
    for result in results:
        # Average each metric over the tasks of the name
        selected = result.selected
        cells = result.cells()
        rows += [(selected.name, metric, selected.num_fewshot, *cell) for metric, cell in cells]
        first_metric, first_cell = cells[0]
        if first_metric not in result.results[0].wholes:
            firsts.append(first_cell)
    if len(firsts) > 1:
        average = _mean(firsts, by_size=False)
        rows.append((f"average of {len(firsts)}", "first metric of each", np.nan, *average))
    return pd.DataFrame(rows, columns=TASKS.header)


def _cell(metric: str, result: TaskResult, against: TaskResult | None) -> Cell:
    """Return the columns of one task and metric, from "num_samples" on."""
    values = result.values[metric]
    aggregate = result.wholes.get(metric)
    cell = (len(values), *_value_and_error(aggregate, values), result.density)
    if against is None:
        nothing = (np.nan,) * 4
        return *cell, *nothing
    others = against.values[metric]
    value, _ = _value_and_error(aggregate, others)
    return *cell, value, against.density, *_value_and_error(aggregate, values, others)


def _value_and_error(
    metric_function: Callable[[list[Any]], float] | None,
    values: list[Any],
    others: list[Any] | None = None,
) -> tuple[float, float]:
    """Compute the value of a model, or its difference to another one, and its standard error.

    ``metric_function`` aggregates values by sample; None is the mean. The error of a metric that is not a mean is from
    resampling, with the same samples for both models.
    """
    # Compute the error of a mean directly
    if metric_function is None:
        scores = np.asarray(values, dtype=float)
        if others is not None:
            scores = scores - np.asarray(others, dtype=float)
        return statistics.mean_and_error(scores)

    def aggregate(chosen: Sequence[int]) -> float:
        """Return the value, or the difference, over some samples."""
        value = float(metric_function([values[index] for index in chosen]))
        if others is not None:
            value -= float(metric_function([others[index] for index in chosen]))
        return value

    num_samples = len(values)
    # Resample the samples, the same for both models
    rng = np.random.default_rng(0)
    resampled = []
    for _ in range(_RESAMPLES):
        resampled.append(aggregate(rng.integers(num_samples, size=num_samples).tolist()))
    return aggregate(range(num_samples)), float(np.std(resampled, ddof=1))


def _mean(cells: Sequence[Cell], *, by_size: bool) -> Cell:
    """Return the mean of the cells of several tasks, whose samples are independent."""
    sizes, *columns = np.array(cells).T
    weights = sizes / sizes.sum() if by_size else np.full(len(cells), 1.0 / len(cells))
    means = []
    for name, column in zip(TASKS.header[-len(columns) :], columns, strict=True):
        weighted = weights * column
        if name.endswith("error"):
            means.append(float(np.sqrt((weighted**2).sum())))
        else:
            means.append(float(weighted.sum()))
    return int(sizes.sum()), *means


def run(options: TasksOptions, reporter: progress.Reporter = progress.SILENT) -> commands.Result:
    """Evaluate a checkpoint on downstream tasks: ``reports/<name>/tasks.csv``, with every sample in ``runs/``."""
    if not reporter.verbose:
        suite.quiet_libraries()
    name = options.name or sized_model.result_name(options.model, options.folders)
    folder = options.folders.report_dir(name)
    sample_folder = options.folders.run_dir(name) / "tasks"

    # Run the tasks on every checkpoint
    reporter.announce("loading tasks and their data")
    with suite.code_allowed(options.allow_code):
        groups = suite.load_suite(
            ",".join(options.names),
            options.include or [],
            options.data_sets or [],
            allow_code=options.allow_code,
            caution=reporter.caution,
        )
        answer = partial(_answer, options, groups, sample_folder, reporter)
        results, origin = answer(options.model, options.tau)
        others: Sequence[list[TaskResult] | None] = [None] * len(groups)
        other_origin = None
        if options.against:
            others, other_origin = answer(options.against, None)
    # Write the table with its origin
    by_name = zip(groups, results, others, strict=True)
    rows = tasks_table([Results(group, first, other) for group, first, other in by_name])
    record = {
        **origin,
        "against": other_origin,
        "tasks": [group.name for group in groups],
        "limit": options.limit,
        "environment": {"lm-eval": version("lm-eval")},
    }
    distributed.on_main(lambda: TASKS.write(folder, rows, record, reporter))
    return commands.Result(samples.SampledTable(name, rows, folder, sample_folder), show)


def _answer(
    options: TasksOptions,
    groups: Sequence[suite.SelectedTasks],
    folder: Path,
    reporter: progress.Reporter,
    source: str,
    tau: float | None,
) -> tuple[list[list[TaskResult]], dict[str, Any]]:
    """Run every task on a checkpoint, reusing finished ones; return results by requested name, and the origin."""
    checkpoint = samples.Checkpoint.load(options, source, tau, reporter)
    identity = checkpoint.identity(f"{checkpoint.origin['tau']} lm-eval {version('lm-eval')}")
    tasks = [task for group in groups for task in group.tasks]
    results = []
    with checkpoint.hard(), reporter.bar("answering") as bar:
        lm = CheckpointLM(checkpoint.model, checkpoint.tokenizer)
        for number, task in enumerate(tasks):
            lm.progress = progress.part_of(bar, number, len(tasks), task.task_name)
            result = run_task(
                lm, task, folder, identity, limit=options.limit, allow_code=options.allow_code
            )
            results.append(result)
    reporter.reused(sum(result.was_kept for result in results), len(tasks), "tasks")
    remaining = iter(results)
    return [[next(remaining) for _ in group.tasks] for group in groups], checkpoint.origin


class TaskRounds(criterion.Rounds):
    """Scores of samples of tasks, whose mean is that over the tasks.

    Each sample is the next one of a random task, whose own samples are in random order; a group counts as one task. A
    verdict ends with the first task that has none left, so that every task keeps its share.
    """

    def __init__(
        self,
        groups: Sequence[suite.SelectedTasks],
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        allow_code: bool,
    ) -> None:
        """Draw the order of all samples; ``seed`` is that of the order and of few-shot examples."""
        self._tokenizer = tokenizer
        self._seed = seed
        self._allow_code = allow_code
        self._samples = _in_random_order(groups, seed)
        self.num_samples = len(self._samples)
        tasks = [task_identity(task) for group in groups for task in group.tasks]
        key = "\0".join([version("lm-eval"), str(seed), *(group.name for group in groups), *tasks])
        self.identity = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()

    def measure(
        self, index: int, model: PreTrainedModel, prepared: criterion.Prepared
    ) -> criterion.Float:
        """Return the score in [0, 1] of each sample of a round."""
        chosen = self._samples[self.part(index)]
        lm = CheckpointLM(model, self._tokenizer)
        scores = np.empty(len(chosen))
        with suite.code_allowed(self._allow_code):
            tasks = {id(task): task for task, _ in chosen}
            for task in tasks.values():
                places = [place for place, (other, _) in enumerate(chosen) if other is task]
                documents = [chosen[place][1] for place in places]
                # Few-shot examples must not depend on the rounds before, which may come from files
                seed = self._seed + index
                scores[places] = score_documents(
                    lm, task, documents, seed=seed, allow_code=self._allow_code
                )
        return scores


def _in_random_order(groups: Sequence[suite.SelectedTasks], seed: int) -> list[tuple[Any, int]]:
    """Return (task, index of its document), each of a random name of the suite, until one of them has no more."""
    random = np.random.default_rng((seed, _STREAM))
    by_name = [
        [(task, number) for task in group.tasks for number in range(len(task.eval_docs))]
        for group in groups
    ]
    orders = [iter(random.permutation(len(of_name)).tolist()) for of_name in by_name]
    chosen: list[tuple[Any, int]] = []
    while True:
        name = int(random.integers(len(orders)))
        sample = next(orders[name], None)
        if sample is None:
            return chosen
        chosen.append(by_name[name][sample])


def show(result: samples.SampledTable) -> None:
    """Print every task by metric, with the other checkpoint if there is one."""
    has_baseline = result.rows["against"].notna().any()
    columns = ["task", "metric", "shots", "value", "density %"]
    if has_baseline:
        columns += ["against", "density %", "difference"]
    grid = console.Table(*columns, title=console.escape(result.name))
    for row in result.rows.itertuples():
        cells = [
            console.escape(row.task),
            console.escape(row.metric),
            "-" if pd.isna(row.num_fewshot) else f"{row.num_fewshot:g}",
            samples.with_error(row.value, row.standard_error),
            samples.percent(row.density),
        ]
        if has_baseline:
            cells += [
                samples.with_error(row.against),
                samples.percent(row.against_density),
                printing.change(row.difference, row.difference_standard_error),
            ]
        grid.add_row(*cells)
    console.out.print(grid)
    samples.say_sample_count(result.rows["num_samples"], "samples per task")
    console.print_path("values", result.folder / "tasks.csv")
    console.print_path("samples", result.samples)
