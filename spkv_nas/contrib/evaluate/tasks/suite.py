"""Load the tasks that a user names, with their data.

lm-eval defines thousands of tasks in YAML files; ``assets`` adds those of this package, ``--include`` those of a
user. The paper's sixteen tasks use its number of few-shot examples (appendix "Evaluation protocol").
"""

import difflib
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import patch_environment
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.progress import Announce, silent
from spkv_nas.contrib.evaluate.tasks.documents import ASSETS

PAPER = "paper"
# Few-shot examples of the paper's tasks; lm-eval has none for HumanEval+
_SHOTS = {
    "arc_challenge": 0,
    "arc_easy": 0,
    "boolq": 0,
    "commonsense_qa": 7,
    "gsm8k": 8,
    "hellaswag": 0,
    "humaneval_plus": 0,
    "mbpp": 3,
    "mmlu": 5,
    "nq_open": 5,
    "openbookqa": 0,
    "piqa": 0,
    "race": 0,
    "race_middle": 0,
    "triviaqa": 5,
    "winogrande": 0,
}
_ALLOW_CODE = "HF_ALLOW_CODE_EVAL"  # required by the library ``evaluate`` to run generated code

Index = dict[str, Any]  # entries of lm-eval's task index by name


@dataclass(frozen=True)
class SelectedTasks:
    """Tasks selected by one name: one task, or those of a group that has a mean.

    ``metrics`` are those that the group averages, empty for a single task, which reports all of its metrics;
    ``by_size`` tells whether such a mean weights tasks by their number of samples.
    """

    name: str
    tasks: list[Task]
    metrics: tuple[str, ...] = ()
    by_size: bool = True

    @property
    def num_fewshot(self) -> int | None:
        """Return the number of few-shot examples; None if it differs between the tasks."""
        numbers = {task.get_config("num_fewshot") for task in self.tasks}
        return numbers.pop() if len(numbers) == 1 else None


def load_suite(
    names: str,
    include: Sequence[str],
    data: Sequence[str],
    *,
    allow_code: bool,
    caution: Announce = silent,
) -> list[SelectedTasks]:
    """Load tasks, groups and tags by comma, or those of "paper", with their data.

    Folders of ``include`` have YAML files of further tasks, later ones take precedence; those of ``data`` have copies
    of data sets by their ids, ``FOLDER/Rowan/hellaswag``. Unless ``allow_code``, the paper's tasks that run code which
    a model writes are left out, which ``caution`` is told, and others refused. Raises ``UserError`` if something is
    missing.
    """
    for folder in [*include, *data]:
        if not Path(folder).is_dir():
            raise UserError(f"folder not found: {folder}")
    # Look up the names
    task_options: dict[str, dict[str, Any]] = {}
    for name in names.split(","):
        if name.strip() == PAPER:
            task_options |= {task: {"num_fewshot": shots} for task, shots in _SHOTS.items()}
        else:
            task_options[name.strip()] = {}
    index = _index(task_options, include)
    # Leave out or refuse tasks that run code
    if not allow_code:
        may_leave_out = _SHOTS.keys() if PAPER in names else set()
        for name in _unsafe(index, task_options, may_leave_out, caution):
            del task_options[name]
    # Load tasks with their data, and report everything that is missing at once
    suite: list[SelectedTasks] = []
    missing = {}
    for name, options in task_options.items():
        try:
            suite += _load(index, name, options | _local(index, name, data))
        except OSError as error:
            missing[name] = error
    if missing:
        raise _no_data(index, missing, len(task_options))
    return suite


def _unsafe(
    index: Index, names: Iterable[str], may_leave_out: AbstractSet[str], caution: Announce
) -> list[str]:
    """Return the tasks that run code which a model writes, and tell ``caution`` that they are left out.

    Raises ``UserError`` if there are others than those of ``may_leave_out``.
    """
    unsafe = []
    for name in names:
        if any(config.get("unsafe_code") for config in _configs(index, name)):
            unsafe.append(name)
    if set(unsafe) - may_leave_out:
        raise UserError(
            f"{', '.join(unsafe)}: these tasks execute code that the model generates\n"
            "leave them out, or give --allow-code in a sandbox"
        )
    if unsafe:
        caution(
            f"left out {', '.join(unsafe)}: they execute code that the model generates "
            "(--allow-code)"
        )
    return unsafe


def seed_generators(seed: int | None = None) -> None:
    """Seed the generators that tasks and sampling draw from; None takes the default seeds of lm-eval."""
    import torch  # after lm-eval, whose absence is named first

    random.seed(DEFAULT_RANDOM_SEED if seed is None else seed)
    np.random.seed(DEFAULT_OTHER_SEED if seed is None else seed)
    torch.manual_seed(DEFAULT_OTHER_SEED if seed is None else seed)


def quiet_libraries() -> None:
    """Silence lm-eval and the datasets library."""
    import datasets

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()


def code_allowed(allowed: bool) -> AbstractContextManager[None]:
    """Let the library ``evaluate`` run code that a model writes while open, if ``allowed``."""
    variables = {_ALLOW_CODE: 1} if allowed else {}
    context: AbstractContextManager[None] = patch_environment(**variables)
    return context


@cache
def _known() -> Index:
    """Return the index of lm-eval's own tasks, for which thousands of files are read."""
    return dict(TaskManager().task_index)


def _index(names: Iterable[str], include: Sequence[str]) -> Index:
    """Return an index that has all names, or ``UserError``; this package's and the user's tasks override lm-eval's."""
    manager = TaskManager(include_path=[str(ASSETS), *include], include_defaults=False)
    index: Index = manager.task_index
    if not all(_is_whole(index, name) for name in names):
        index = {**_known(), **index}
    for name in names:
        if name not in index:
            similar = difflib.get_close_matches(name, [PAPER, *index], 3)
            hint = f"; similar names: {', '.join(similar)}" if similar else ""
            raise UserError(f"unknown task '{name}'{hint}")
    return index


def _members(entry: Any) -> list[str]:
    """Return the names of the members of a group or tag; empty for a task."""
    if entry.tags and not entry.cfg:
        return sorted(entry.tags)
    members = (entry.cfg or {}).get("task")
    if not isinstance(members, list):
        return []
    names = []
    for member in members:
        names.append(member if isinstance(member, str) else member.get("group") or member["task"])
    return names


def _is_whole(index: Index, name: str) -> bool:
    """Return True if the index has a name and, recursively, all its members."""
    return name in index and all(_is_whole(index, member) for member in _members(index[name]))


def _configs(index: Index, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the config of a task, or those of all tasks of a group or tag."""
    entry = index.get(name)
    # Defined inline in a group
    if entry is None:
        return
    members = _members(entry)
    for member in members:
        yield from _configs(index, member)
    if not members:
        yield entry.cfg


def _local(index: Index, name: str, folders: Sequence[str]) -> dict[str, str]:
    """Return the option that loads the local copy of a data set; for a group only if its tasks share one data set."""
    data_sets = {config.get("dataset_path") for config in _configs(index, name)}
    data_set = data_sets.pop() if len(data_sets) == 1 else None
    if not data_set:
        return {}
    for folder in folders:
        local_copy = Path(folder) / data_set
        if local_copy.is_dir():
            return {"dataset_path": str(local_copy.resolve())}
    return {}


def _load(index: Index, name: str, options: dict[str, Any]) -> list[SelectedTasks]:
    """Load the tasks of one name, with ``options`` overriding their YAML files; a group with a mean stays together."""
    seed_generators()
    # Build the tasks of the name
    built = TaskFactory().build(index[name], overrides=options, registry=index)
    means: list[Any] = []
    if isinstance(built, Group):
        tasks = built.get_all_tasks()
        means = built.aggregate_metric_list or []
    else:
        tasks = built if isinstance(built, list) else [built]
    for task in tasks:
        _prepare(task)
    # Keep the tasks of a group together if it reports a mean
    if not means:
        return [SelectedTasks(task.task_name, [task]) for task in tasks]
    metrics = tuple(mean.metric for mean in means)
    return [SelectedTasks(name, tasks, metrics, all(mean.weight_by_size for mean in means))]


def _prepare(task: Task) -> None:
    """Ask without examples unless the task sets their number, and read its documents once.

    lm-eval processes documents at every access, and would score others than it asked if that is random.
    """
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    for method in ("test_docs", "validation_docs", "fewshot_docs"):
        setattr(task, method, cache(getattr(task, method)))
    len(task.eval_docs)


def _no_data(index: Index, missing: Mapping[str, OSError], number: int) -> UserError:
    """Return the error that names the missing data sets and how to download them."""
    tasks = []
    for name in missing:
        data_sets = {str(config.get("dataset_path")) for config in _configs(index, name)}
        tasks.append(f"{name} ({', '.join(sorted(data_sets))})")
    first, error = next(iter(missing.items()))
    return UserError(
        f"no data for {len(missing)} of {number} tasks: {', '.join(tasks)}\n"
        "on a machine with network access run hf download --repo-type dataset ID --local-dir "
        "FOLDER/ID, then give --data-sets FOLDER\n"
        f"error for {first}: {first_line(error)}"
    )
