"""Which tasks are asked for, by name, and where their data is.

lm-eval knows thousands of tasks by their YAML files; ``assets/tasks`` adds ours, ``--include`` those of a user. The
paper's sixteen are asked with its number of examples (appendix "Evaluation protocol").
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory

from spkv_nas.base.assets import TASKS
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.progress import Announce, silent

PAPER = "paper"
_SHOTS = {  # of the paper's tasks; HumanEval+ has functions to complete, and no examples in lm-eval
    "arc_challenge": 0, "arc_easy": 0, "boolq": 0, "commonsense_qa": 7, "gsm8k": 8, "hellaswag": 0, "humaneval_plus": 0,
    "mbpp": 3, "mmlu": 5, "nq_open": 5, "openbookqa": 0, "piqa": 0, "race": 0, "race_middle": 0, "triviaqa": 5,
    "winogrande": 0,
}  # fmt: skip
_FEWSHOT_SEED = 1234  # lm-eval's own
_ALLOW_CODE = "HF_ALLOW_CODE_EVAL"  # without which the library ``evaluate`` runs none

Index = dict[str, Any]  # lm-eval's entries by name


@dataclass(frozen=True)
class Asked:
    """What one name stands for.

    Attributes:
        tasks: one, or those of a group that has a mean.
        metrics: of a group, those that it has a mean of; empty for a single task, which has all of its own.
        by_size: whether such a mean weights tasks by their samples.
    """

    name: str
    tasks: list[Task]
    metrics: tuple[str, ...] = ()
    by_size: bool = True

    @property
    def num_fewshot(self) -> int | None:
        """Examples before each question; None if the tasks have different numbers of them."""
        found = {task.get_config("num_fewshot") for task in self.tasks}
        return found.pop() if len(found) == 1 else None


def load_suite(
    names: str, include: Sequence[str], data: Sequence[str], *, allow_code: bool, caution: Announce = silent
) -> list[Asked]:
    """The tasks of ``names``, by comma, with their data.

    Args:
        include: folders with YAML files of further tasks; of one name, the last is taken.
        data: folders with copies of data sets by their ids, ``FOLDER/Rowan/hellaswag``.
        allow_code: whether tasks may run what a model writes, inside ``code_allowed``; the paper's that do are left out
            otherwise.
        caution: told what was left out.

    Raises:
        UserError: a folder or task that is not there, code that is not allowed, or data that is not there.
    """
    for folder in [*include, *data]:
        if not Path(folder).is_dir():
            raise UserError(f"folder not found: {folder}")
    asked: dict[str, dict[str, Any]] = {}
    for name in (name.strip() for name in names.split(",")):
        asked |= {task: {"num_fewshot": shots} for task, shots in _SHOTS.items()} if name == PAPER else {name: {}}
    index = _index(asked, include)
    unsafe = [name for name in asked if any(entry.get("unsafe_code") for entry in _configs(index, name))]
    if unsafe and not allow_code:
        if set(unsafe) - (_SHOTS.keys() if PAPER in names else set()):
            raise UserError(
                f"{', '.join(unsafe)} runs the code that a model writes: leave it out, or give --allow-code where it "
                "can do no harm"
            )
        caution(f"left out, as they run the code that a model writes: {', '.join(unsafe)} (--allow-code)")
        asked = {name: options for name, options in asked.items() if name not in unsafe}
    found: list[Asked] = []
    missing = {}
    for name, options in asked.items():
        try:
            found += _load(index, name, options | _local(index, name, data))
        except OSError as error:
            missing[name] = error
    if missing:
        raise _no_data(index, missing, len(asked))
    return found


@contextmanager
def code_allowed(allowed: bool) -> Iterator[None]:
    """Inside the ``with`` block the library ``evaluate`` runs what a model writes, if that is allowed."""
    before = os.environ.get(_ALLOW_CODE)
    if allowed:
        os.environ[_ALLOW_CODE] = "1"
    try:
        yield
    finally:
        if allowed:
            os.environ.pop(_ALLOW_CODE)
            if before is not None:
                os.environ[_ALLOW_CODE] = before


@cache
def _known() -> Index:
    """lm-eval's own tasks; thousands of files are read."""
    index: Index = TaskManager().task_index
    return index


def _index(names: Iterable[str], include: Sequence[str]) -> Index:
    """An index that has all names, those of ours and of the user before lm-eval's."""
    index: Index = TaskManager(include_path=[str(TASKS), *include], include_defaults=False).task_index
    if not all(_is_whole(index, name) for name in names):
        index = {**_known(), **index}
    for name in names:
        if name not in index:
            near = difflib.get_close_matches(name, [PAPER, *index], 3)
            raise UserError(f"there is no task '{name}'" + (f"; nearest: {', '.join(near)}" if near else ""))
    return index


def _members(entry: Any) -> list[str]:
    """The names of what a group or a tag holds; of a task, none."""
    if entry.tags and not entry.cfg:
        return sorted(entry.tags)
    members = (entry.cfg or {}).get("task")
    if not isinstance(members, list):
        return []
    return [member if isinstance(member, str) else member.get("group") or member["task"] for member in members]


def _is_whole(index: Index, name: str) -> bool:
    """Whether an index has what a name stands for."""
    return name in index and all(_is_whole(index, member) for member in _members(index[name]))


def _configs(index: Index, name: str) -> Iterator[Mapping[str, Any]]:
    """The config of a task, or those of all tasks of a group or tag."""
    entry = index.get(name)
    if entry is None:  # written out within a group
        return
    members = _members(entry)
    for member in members:
        yield from _configs(index, member)
    if not members:
        yield entry.cfg


def _local(index: Index, name: str, folders: Sequence[str]) -> dict[str, str]:
    """Where the local copy of the data set of a task is; of a group, if all of its tasks have the same."""
    sets = {config.get("dataset_path") for config in _configs(index, name)}
    if len(sets) == 1 and (own := sets.pop()):
        for folder in folders:
            if (copy := Path(folder) / own).is_dir():
                return {"dataset_path": str(copy.resolve())}
    return {}


def _load(index: Index, name: str, options: dict[str, Any]) -> list[Asked]:
    """One name's tasks, with ``options`` in place of what their YAML files say; together if they have a mean."""
    built = TaskFactory().build(index[name], overrides=options, registry=index)
    is_group = isinstance(built, Group)
    tasks = built.get_all_tasks() if is_group else built if isinstance(built, list) else [built]
    for task in tasks:
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    means = (is_group and built.aggregate_metric_list) or []
    if not means:
        return [Asked(task.task_name, [task]) for task in tasks]
    return [Asked(name, tasks, tuple(mean.metric for mean in means), all(mean.weight_by_size for mean in means))]


def _no_data(index: Index, missing: Mapping[str, OSError], number: int) -> UserError:
    """The error that names what is missing, and how to bring it."""
    sets = [
        f"{name} ({', '.join(sorted({str(config.get('dataset_path')) for config in _configs(index, name)}))})"
        for name in missing
    ]
    return UserError(
        f"no data for {len(missing)} of {number} tasks: {', '.join(sets)}\n"
        "where there is a network: hf download --repo-type dataset ID --local-dir FOLDER/ID; here: --data FOLDER\n"
        f"of {next(iter(missing))}: {first_line(next(iter(missing.values())))}"
    )
