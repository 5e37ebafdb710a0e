"""A task is put to a checkpoint, and what it answered is kept by sample, so that the next run need not ask again.

A finished task is a file (``evaluation.samples``): what the whole of it gave, then every sample. It depends on the
checkpoint and its gates, on the requests, and on the task's config.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.api import task as tasks_module
from lm_eval.api.metrics import mean
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.utils import handle_non_serializable

from spkv_nas.base.distributed import on_main
from spkv_nas.base.files import is_file
from spkv_nas.evaluation.samples import read_samples, sample_file, write_samples
from spkv_nas.evaluation.tasks.language_model import CheckpointLM

_OF_PLACES = ("metadata", "dataset_path", "dataset_kwargs")  # of a config; the requests have what they led to
_KEPT = ("doc_id", "filter", "target", "resps", "filtered_resps")  # of lm-eval's samples


@dataclass(frozen=True)
class Found:
    """What a checkpoint gave to a task.

    Attributes:
        values: of each metric, by sample; ``exact_match (strict-match)`` where the task has several filters.
        wholes: by metric, what makes one value of those; None: their mean.
        density: mean over the heads, of all real tokens.
        was_kept: whether an earlier run has answered.
    """

    values: dict[str, list[Any]]
    density: float
    wholes: dict[str, Callable[[list[Any]], float]] = field(default_factory=dict)
    was_kept: bool = False


def run_task(
    lm: CheckpointLM, task: Task, folder: Path, identity: str, *, limit: int | None = None, allow_code: bool = False
) -> Found:
    """What a checkpoint gives to a task, or has given; collective.

    Args:
        folder: of what is finished.
        identity: of the checkpoint, its gates and its dtype.
        limit: the first samples alone.
    """
    with _without_bars():
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        file = sample_file(folder, task.task_name, _content(task, identity))
        was_kept = on_main(partial(is_file, file))
        if not was_kept:
            lm.start()
            found = evaluate(
                lm,
                {"tasks": {task.task_name: task}},
                limit=limit,
                bootstrap_iters=0,
                confirm_run_unsafe_code=allow_code,
            )
            density = lm.stop()
            on_main(lambda: _write(file, task, density, found["samples"][task.task_name]))
    return on_main(partial(_read, file, task, was_kept))


def _content(task: Task, identity: str) -> str:
    """All that the answers to a task, and their scores, depend on."""
    config = {key: value for key, value in task.dump_config().items() if key not in _OF_PLACES}
    requests = [[one.request_type, one.args] for one in task.instances]
    return json.dumps([identity, config, requests], sort_keys=True, default=_named)


def _named(value: Any) -> str:
    """A function by its name, not by its place in memory."""
    return str(getattr(value, "__qualname__", None) or value)


def _write(file: Path, task: Task, density: float, samples: list[dict[str, Any]]) -> None:
    head = {"task": task.task_name, "num_fewshot": task.get_config("num_fewshot"), "density": density}
    write_samples(file, [head, *map(_sample, samples)], default=handle_non_serializable)


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a sample: a prompt once, and what followed it in each request."""
    prompt, *_ = sample["arguments"][0]
    return {
        **{key: sample[key] for key in _KEPT},
        "prompt": prompt,
        "asked": [request[1:] for request in sample["arguments"]],
        "metrics": {metric: sample[metric] for metric in sample["metrics"]},
    }


def _read(file: Path, task: Task, was_kept: bool) -> Found:
    head, *samples = read_samples(file)
    several = len({sample["filter"] for sample in samples}) > 1
    values: dict[str, list[Any]] = {}
    wholes = {}
    for sample in samples:
        for metric, value in sample["metrics"].items():
            name = f"{metric} ({sample['filter']})" if several else metric
            values.setdefault(name, []).append(value)
            whole = task.aggregation().get(metric, mean)
            if whole is not mean:
                wholes[name] = whole
    return Found(values, head["density"], wholes, was_kept)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Inside the ``with`` block lm-eval shows no bar while it makes its requests."""
    before = tasks_module.tqdm
    tasks_module.tqdm = partial(before, disable=True)
    try:
        yield
    finally:
        tasks_module.tqdm = before
