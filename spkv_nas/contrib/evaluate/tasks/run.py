"""Run a task on a checkpoint and cache its answers by sample, so that the next run can reuse them.

A finished task is a file (``evaluation.samples``): a header with the density, then every sample. Its name depends on
the checkpoint and its gates, on the requests, and on the task's config.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.api import task as tasks_module
from lm_eval.api.metrics import mean
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.utils import handle_non_serializable

from spkv_nas.base.distributed import on_main
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import is_file
from spkv_nas.contrib.evaluate.tasks.language_model import CheckpointLM
from spkv_nas.contrib.evaluate.tasks.suite import seed_generators
from spkv_nas.evaluation.samples import read_samples, sample_file, write_samples

# Config keys left out of the hash, as the requests contain their effect
_OF_PLACES = ("metadata", "dataset_path", "dataset_kwargs")
_KEPT = ("doc_id", "filter", "target", "resps", "filtered_resps")  # keys kept of lm-eval's samples


@dataclass(frozen=True)
class TaskResult:
    """Results of a checkpoint on a task.

    Attributes:
        values: values of each metric by sample; named ``exact_match (strict-match)`` if the task has several filters.
        density: mean over the heads, over all real tokens.
        wholes: aggregation function by metric; metrics that are not in it are averaged.
        was_kept: True if the answers come from an earlier run.
    """

    values: dict[str, list[Any]]
    density: float
    wholes: dict[str, Callable[[list[Any]], float]] = field(default_factory=dict)
    was_kept: bool = False


def run_task(
    lm: CheckpointLM, task: Task, folder: Path, identity: str, *, limit: int | None = None, allow_code: bool = False
) -> TaskResult:
    """Run a task, or read its cached answers; must be called on all ranks.

    Args:
        lm: checkpoint to evaluate.
        task: task to run.
        folder: folder of finished tasks.
        identity: text that identifies the checkpoint, its gates and its dtype.
        limit: maximum number of samples, from the first; None runs all.
        allow_code: True if the task may run code that the model writes.
    """
    # Build the requests, which the file name depends on
    with _requests_built(task, limit=limit):
        file = sample_file(folder, task.task_name, _content(task, identity))
        was_kept = on_main(partial(is_file, file))
        # Answer them unless an earlier run has
        if not was_kept:
            lm.start()
            results = evaluate(
                lm,
                {"tasks": {task.task_name: task}},
                limit=limit,
                bootstrap_iters=0,
                confirm_run_unsafe_code=allow_code,
            )
            density = lm.stop()
            on_main(lambda: _write(file, task, density, results["samples"][task.task_name]))
    return on_main(partial(_read, file, task, was_kept))


def score_documents(
    lm: CheckpointLM, task: Task, documents: Sequence[int], *, seed: int, allow_code: bool = False
) -> list[float]:
    """Return the score in [0, 1] of some documents of a task, without reading or writing files.

    The score is the first metric of the task's first filter, that of ``tasks_table``'s average.

    Args:
        lm: checkpoint to evaluate.
        task: task to run.
        documents: indices of its documents, at least one.
        seed: random seed of few-shot examples and of sampling, which must differ between calls.
        allow_code: as in ``run_task``.

    Raises:
        UserError: the metric is no mean of scores from 0 to 1, of which more are better.
    """
    name, ordered = task.task_name, sorted(documents)
    # Answer the documents
    with _requests_built(task, seed, samples=ordered):
        results = evaluate(
            lm,
            {"tasks": {name: task}},
            samples={name: ordered},
            bootstrap_iters=0,
            confirm_run_unsafe_code=allow_code,
        )
    # Select the first metric of the first filter
    samples = results["samples"][name]
    first, metric = samples[0]["filter"], samples[0]["metrics"][0]
    scores = {sample["doc_id"]: sample[metric] for sample in samples if sample["filter"] == first}
    # Check that a mean of these scores is what the task reports
    is_mean = task.aggregation().get(metric, mean) is mean and task.higher_is_better().get(metric, True)
    if not is_mean or not all(isinstance(score, int | float) and 0.0 <= score <= 1.0 for score in scores.values()):
        raise UserError(
            f"task {name}: its first metric, {metric}, is no mean of scores from 0 to 1 by sample, so it allows no "
            "verdict\nleave the task out, or choose another metric in your own YAML file of the task"
        )
    return [float(scores[document]) for document in documents]


def task_identity(task: Task) -> str:
    """Return a text of everything that the scores of ``score_documents`` depend on besides model and seed."""
    config = {key: value for key, value in task.dump_config().items() if key not in _OF_PLACES}
    examples = list(task.fewshot_docs()) if config.get("num_fewshot") else []
    return json.dumps([config, list(task.eval_docs), examples], sort_keys=True, default=_named)


def _content(task: Task, identity: str) -> str:
    """Return a text of everything that the answers to a task, and their scores, depend on."""
    config = {key: value for key, value in task.dump_config().items() if key not in _OF_PLACES}
    requests = [[instance.request_type, instance.args] for instance in task.instances]
    return json.dumps([identity, config, requests, DEFAULT_OTHER_SEED], sort_keys=True, default=_named)


def _named(value: Any) -> str:
    """Represent a function by its name instead of its address in memory."""
    return str(getattr(value, "__qualname__", None) or value)


def _write(file: Path, task: Task, density: float, samples: list[dict[str, Any]]) -> None:
    """Write a finished task."""
    header = {"task": task.task_name, "num_fewshot": task.get_config("num_fewshot"), "density": density}
    write_samples(file, [header, *map(_sample, samples)], default=handle_non_serializable)


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a sample: its prompt once, and the continuation of each request."""
    prompt, *_ = sample["arguments"][0]
    return {
        **{key: sample[key] for key in _KEPT},
        "prompt": prompt,
        "asked": [request[1:] for request in sample["arguments"]],
        "metrics": {metric: sample[metric] for metric in sample["metrics"]},
    }


def _read(file: Path, task: Task, was_kept: bool) -> TaskResult:
    """Read a finished task."""
    header, *samples = read_samples(file)
    has_filters = len({sample["filter"] for sample in samples}) > 1
    values: dict[str, list[Any]] = {}
    wholes = {}
    # Collect the values of every metric, by filter if there are several
    for sample in samples:
        for metric, value in sample["metrics"].items():
            name = f"{metric} ({sample['filter']})" if has_filters else metric
            values.setdefault(name, []).append(value)
            aggregate = task.aggregation().get(metric, mean)
            if aggregate is not mean:
                wholes[name] = aggregate
    return TaskResult(values, header["density"], wholes, was_kept)


@contextmanager
def _requests_built(task: Task, seed: int | None = None, **documents: Any) -> Iterator[None]:
    """Build a task's requests as lm-eval's ``simple_evaluate`` does; ``evaluate`` asks them while this is open.

    All random generators are seeded first, so that few-shot examples and sampled answers depend on nothing before.

    Args:
        task: task to run.
        seed: random seed; None takes lm-eval's default seeds.
        documents: options of ``build_all_requests`` that select documents.
    """
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED if seed is None else seed)
    seed_generators(seed)
    # Hide lm-eval's progress bar
    original = tasks_module.tqdm
    tasks_module.tqdm = partial(original, disable=True)
    try:
        task.build_all_requests(rank=0, world_size=1, **documents)
    finally:
        tasks_module.tqdm = original
    # Building them again would draw other few-shot examples
    task.build_all_requests = lambda **_: None
    try:
        yield
    finally:
        del task.build_all_requests
