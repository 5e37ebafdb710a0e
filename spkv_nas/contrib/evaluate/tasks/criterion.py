"""Criterion ``tasks``: samples of lm-eval's tasks."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.contrib.evaluate.tasks.options import AllowCode, DataSets, Include
from spkv_nas.evaluation.verdict import criterion

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from spkv_nas.contrib.evaluate.tasks.suite import SelectedTasks

_STREAM = 36  # separates the order of samples from other uses of the seed

TaskNames = Annotated[str | None, Flag("Comma-separated lm-eval tasks, such as stdlib_completions, which is built in.")]


@dataclass(frozen=True)
class TaskSamples(criterion.Criterion):
    """Drop of the mean score over tasks."""

    name, help, title = "tasks", "drop of the mean score of lm-eval's tasks, in percentage points", "Downstream tasks"
    noun, reads_text = "samples", False
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
                "--margin tasks=... needs names, comma-separated lm-eval tasks, such as tasks=2:names=hellaswag,gsm8k"
            )
        check_exist(self.include or (), "folder of tasks")

    def prepare(self, setting: criterion.Setting) -> criterion.Rounds:
        """Return the samples of the tasks, each of a random task."""
        from spkv_nas.contrib.evaluate.tasks.suite import load_suite, quiet_libraries

        if not setting.reporter.verbose:
            quiet_libraries()
        setting.reporter.announce("loading tasks and their data")
        folders = self.include or [], self.data_sets or []
        caution = setting.reporter.caution
        suite = load_suite(str(self.names), *folders, allow_code=self.allow_code, caution=caution)
        return TaskRounds(suite, setting.tokenizer, seed=setting.seed, allow_code=self.allow_code)


class TaskRounds(criterion.Rounds):
    """Scores of samples of tasks, whose mean is that over the tasks.

    Each sample is the next one of a random task, whose own samples are in random order; a group counts as one task. A
    verdict ends with the first task that has none left, so that every task keeps its share.
    """

    def __init__(
        self, suite: "Sequence[SelectedTasks]", tokenizer: "PreTrainedTokenizerBase", *, seed: int, allow_code: bool
    ) -> None:
        """Draw the order of all samples; ``seed`` is that of the order and of few-shot examples."""
        from spkv_nas.contrib.evaluate.tasks.stage import task_identity

        self._tokenizer, self._seed, self._allow_code = tokenizer, seed, allow_code
        self._samples = _in_random_order(suite, seed)
        self.num_samples = len(self._samples)
        tasks = [task_identity(task) for group in suite for task in group.tasks]
        key = "\0".join([version("lm-eval"), str(seed), *(group.name for group in suite), *tasks])
        self.identity = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()

    def measure(self, index: int, model: "PreTrainedModel", prepared: criterion.Prepared) -> criterion.Float:
        """Return the score in [0, 1] of each sample of a round."""
        from spkv_nas.contrib.evaluate.tasks import language_model, stage, suite

        samples = self._samples[self.part(index)]
        lm, scores = language_model.CheckpointLM(model, self._tokenizer), np.empty(len(samples))
        with suite.code_allowed(self._allow_code):
            for task in {id(task): task for task, _ in samples}.values():
                places = [place for place, (other, _) in enumerate(samples) if other is task]
                documents = [samples[place][1] for place in places]
                # Few-shot examples must not depend on the rounds before, which may come from files
                seed = self._seed + index
                scores[places] = stage.score_documents(lm, task, documents, seed=seed, allow_code=self._allow_code)
        return scores


def _in_random_order(suite: "Sequence[SelectedTasks]", seed: int) -> list[tuple[Any, int]]:
    """Return (task, index of its document), each of a random name of the suite, until one of them has no more."""
    random = np.random.default_rng((seed, _STREAM))
    by_name = [[(task, number) for task in group.tasks for number in range(len(task.eval_docs))] for group in suite]
    orders = [iter(random.permutation(len(samples)).tolist()) for samples in by_name]
    chosen: list[tuple[Any, int]] = []
    while True:
        name = int(random.integers(len(orders)))
        sample = next(orders[name], None)
        if sample is None:
            return chosen
        chosen.append(by_name[name][sample])


TASKS = TaskSamples()
