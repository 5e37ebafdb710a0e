"""Measure generated answers to RULER's questions in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.contrib.evaluate.ruler.answers import answer
from spkv_nas.data.ruler.sample import Sample
from spkv_nas.evaluation.verdict.rounds import Float, Prepared, Unprepared

_ROUND_QUESTIONS = 16
_NO_ROOM = -1.0  # score of a question that does not fit in its length
_STREAM = 35  # separates the order of questions from other uses of the seed

MakeSample = Callable[[str, int, int], Sample | None]  # task, length, index


class QuestionRounds(Unprepared):
    """Scores of generated answers to RULER's questions. Each question is of a random task and length.

    All rounds are full, the last too, so that they do not depend on the number of questions.

    Args:
        cells: (task, length) to draw from, with equal probability.
        make: makes a question.
        tokenizer: tokenizer of the models.
        number: number of questions.
        seed: seed of the order.
        identity: identity of the questions besides these.
    """

    def __init__(
        self,
        cells: Sequence[tuple[str, int]],
        make: MakeSample,
        tokenizer: PreTrainedTokenizerBase,
        *,
        number: int,
        seed: int,
        identity: str,
    ) -> None:
        """Draw the cells of all questions, and number the questions of each cell."""
        self._make, self._tokenizer = make, tokenizer
        self.num_samples = number
        self.identity = f"{identity} {seed} {list(cells)}"
        counts = dict.fromkeys(cells, 0)
        drawn_questions = self.num_rounds * _ROUND_QUESTIONS
        self._questions: list[tuple[str, int, int]] = []
        for drawn in np.random.default_rng((seed, _STREAM)).integers(len(cells), size=drawn_questions).tolist():
            cell = cells[drawn]
            self._questions.append((*cell, counts[cell]))
            counts[cell] += 1

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds."""
        return -(-self.num_samples // _ROUND_QUESTIONS)

    def measure(self, index: int, model: PreTrainedModel, prepared: Prepared) -> Float:
        """Return the score in [0, 1] of each question of a round; -1 for one that does not fit in its length."""
        questions = self._questions[index * _ROUND_QUESTIONS : (index + 1) * _ROUND_QUESTIONS]
        # The longest question comes first, because the batch size is chosen by it
        order = sorted(range(len(questions)), key=lambda number: (-questions[number][1], questions[number]))
        lines = answer(model, self._tokenizer, lambda number: self._make(*questions[order[number]]), len(order))
        scores = np.full(len(questions), _NO_ROOM)
        for line in lines:
            scores[order[line["index"]]] = line["score"]
        return scores

    def scores(self, measured: Sequence[Float]) -> Float:
        """Return the scores of all questions that fit in their length."""
        scores: Float = np.concatenate([np.empty(0), *measured])[: self.num_samples]
        fitting: Float = scores[scores != _NO_ROOM]
        return fitting
