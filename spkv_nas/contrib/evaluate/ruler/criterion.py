"""Criterion ``ruler``: RULER's questions, by generated answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import numpy as np

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_REPEATS
from spkv_nas.contrib.evaluate.ruler import options
from spkv_nas.evaluation.verdict import criterion

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from spkv_nas.contrib.evaluate.ruler.stage import MakeSample

QUESTIONS = 2000  # default maximum number of questions
_FIRST_SEED = 1 << 41  # other questions than those of ``evaluate ruler`` and of training, which may have chosen
_STREAM = 35  # separates the order of questions from other uses of the seed

MaxQuestions = Annotated[int, Flag("Maximum number of questions, over all tasks and lengths.", low=1, high=MAX_REPEATS)]


@dataclass(frozen=True)
class RulerQuestions(criterion.Criterion):
    """Drop of the share of correct answers to RULER's questions."""

    name, help, title = "ruler", "drop of RULER's share of correct answers, in percentage points", "RULER"
    noun, reads_text = "questions", False
    test = criterion.MeanDrop()

    lengths: options.OptionalLengths = None
    tasks: options.RulerTasks = default(None, "all")
    questions: MaxQuestions = QUESTIONS
    haystack: options.Haystack = default(None, "RULER's noise")
    qa: options.Questions = default(None, "none; qa_1 and qa_2 are left out")

    def check(self) -> None:
        """Check the lengths, the tasks and the material of RULER."""
        if self.lengths is None:
            raise UserError(
                "--margin ruler=... needs lengths, comma-separated prompt lengths in tokens, such as "
                "ruler=2:lengths=512,4k"
            )
        options.check_questions(self.lengths, self.tasks, self.haystack, self.qa)

    def prepare(self, setting: criterion.Setting) -> criterion.Rounds:
        """Return RULER's questions, each of a random task and length."""
        from spkv_nas.contrib.evaluate.ruler.stage import Questions
        from spkv_nas.data.ruler.sample import VERSION
        from spkv_nas.evaluation.micro_batch import check_positions

        questions = Questions.read(str(self.lengths), self.tasks, self.haystack, self.qa)
        check_positions(setting.dense, questions.lengths[-1], "lengths")
        make = questions.maker(_FIRST_SEED + setting.seed, setting.tokenizer)
        identity = f"{VERSION} {_FIRST_SEED} {version('wonderwords')} {questions.material.identity}"
        order = {"number": self.questions, "seed": setting.seed}
        return QuestionRounds(questions.cells, make, setting.tokenizer, **order, identity=identity)


class QuestionRounds(criterion.Rounds):
    """Scores of generated answers to RULER's questions. Each question is of a random task and length.

    All rounds are full, the last too, so that they do not depend on the number of questions.
    """

    def __init__(
        self,
        cells: Sequence[tuple[str, int]],
        make: "MakeSample",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        number: int,
        seed: int,
        identity: str,
    ) -> None:
        """Draw the (task, length) of all questions, with equal probability, and number the questions of each."""
        self._make, self._tokenizer, self.num_samples = make, tokenizer, number
        self.identity = f"{identity} {seed} {list(cells)}"
        counts = dict.fromkeys(cells, 0)
        drawn_cells = np.random.default_rng((seed, _STREAM)).integers(len(cells), size=self.num_rounds * self.size)
        self._questions: list[tuple[str, int, int]] = []
        for drawn in drawn_cells.tolist():
            cell = cells[drawn]
            self._questions.append((*cell, counts[cell]))
            counts[cell] += 1

    def measure(self, index: int, model: "PreTrainedModel", prepared: criterion.Prepared) -> criterion.Float:
        """Return the score in [0, 1] of each question; ``NO_SCORE`` for one that does not fit in its length."""
        from spkv_nas.contrib.evaluate.ruler.stage import answer

        questions = self._questions[self.part(index)]
        # The longest question comes first, because the batch size is chosen by it
        order = sorted(range(len(questions)), key=lambda number: (-questions[number][1], questions[number]))
        lines = answer(model, self._tokenizer, lambda number: self._make(*questions[order[number]]), len(order))
        scores = np.full(len(questions), criterion.NO_SCORE)
        for line in lines:
            scores[order[line["index"]]] = line["score"]
        return scores


RULER = RulerQuestions()
