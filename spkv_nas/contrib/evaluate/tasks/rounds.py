"""Measure samples of lm-eval's tasks in rounds, each sample of a random task."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
from lm_eval.api.task import Task
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.contrib.evaluate.tasks.language_model import CheckpointLM
from spkv_nas.contrib.evaluate.tasks.run import score_documents, task_identity
from spkv_nas.contrib.evaluate.tasks.suite import SelectedTasks, code_allowed
from spkv_nas.evaluation.verdict.rounds import Float, Prepared, Unprepared

_ROUND_SAMPLES = 16
_STREAM = 36  # separates the order of samples from other uses of the seed


class TaskRounds(Unprepared):
    """Scores of samples of tasks, whose mean is that over the tasks.

    Each sample is the next one of a random task, whose own samples are in random order; a group counts as one task. A
    verdict ends with the first task that has none left, so that every task keeps its share.

    Args:
        suite: tasks with their data.
        tokenizer: tokenizer of the models.
        seed: seed of the order and of few-shot examples.
        allow_code: whether tasks may run code that the model writes.
    """

    def __init__(
        self,
        suite: Sequence[SelectedTasks],
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        allow_code: bool = False,
    ) -> None:
        """Draw the order of all samples."""
        self._tokenizer, self._seed, self._allow_code = tokenizer, seed, allow_code
        self._samples = list(_in_random_order(suite, seed))
        tasks = [task_identity(task) for group in suite for task in group.tasks]
        names = [group.name for group in suite]
        key = "\0".join([version("lm-eval"), str(seed), *names, *tasks])
        self.identity = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds, the last of which may be shorter."""
        return math.ceil(self.num_samples / _ROUND_SAMPLES)

    @property
    def num_samples(self) -> int:
        """Return the number of samples."""
        return len(self._samples)

    def measure(self, index: int, model: PreTrainedModel, prepared: Prepared) -> Float:
        """Return the score in [0, 1] of each sample of a round."""
        samples = self._samples[index * _ROUND_SAMPLES : (index + 1) * _ROUND_SAMPLES]
        lm, scores = CheckpointLM(model, self._tokenizer), np.empty(len(samples))
        with code_allowed(self._allow_code):
            for task in {id(task): task for task, _ in samples}.values():
                places = [place for place, (other, _) in enumerate(samples) if other is task]
                documents = [samples[place][1] for place in places]
                # Few-shot examples must not depend on the rounds before, which may come from files
                seed = self._seed + index
                scores[places] = score_documents(lm, task, documents, seed=seed, allow_code=self._allow_code)
        return scores

    def scores(self, measured: Sequence[Float]) -> Float:
        """Return the scores of all samples."""
        scores: Float = np.concatenate([np.empty(0), *measured])
        return scores


def _in_random_order(suite: Sequence[SelectedTasks], seed: int) -> list[tuple[Task, int]]:
    """Return (task, index of its document), each of a random name of the suite, until one of them has no more."""
    random = np.random.default_rng((seed, _STREAM))
    by_name = [[(task, number) for task in group.tasks for number in range(len(task.eval_docs))] for group in suite]
    orders = [iter(random.permutation(len(samples)).tolist()) for samples in by_name]
    chosen: list[tuple[Task, int]] = []
    while True:
        name = int(random.integers(len(orders)))
        sample = next(orders[name], None)
        if sample is None:
            return chosen
        chosen.append(by_name[name][sample])
