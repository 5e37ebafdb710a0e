"""Criterion ``ruler``: RULER's questions, by generated answers."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_REPEATS
from spkv_nas.contrib.evaluate.ruler import options
from spkv_nas.evaluation.verdict import criterion

QUESTIONS = 2000  # default maximum number of questions
# Other questions than those of ``evaluate ruler`` and of training, which may have chosen
_FIRST_SEED = 1 << 41

MaxQuestions = Annotated[
    int, Flag("Maximum number of questions, over all tasks and lengths.", low=1, high=MAX_REPEATS)
]


@dataclass(frozen=True)
class RulerQuestions(criterion.Criterion):
    """Drop of the share of correct answers to RULER's questions."""

    name = "ruler"
    help = "drop of RULER's share of correct answers, in percentage points"
    title = "RULER"
    noun = "questions"
    reads_text = False
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
                "--margin ruler=... needs lengths, comma-separated prompt lengths in tokens, such "
                "as ruler=2:lengths=512,4k"
            )
        options.check_questions(self.lengths, self.tasks, self.haystack, self.qa)

    def prepare(self, setting: criterion.Setting) -> criterion.Rounds:
        """Return RULER's questions, each of a random task and length."""
        from spkv_nas.contrib.evaluate.ruler.stage import QuestionRounds, Questions
        from spkv_nas.data.ruler.sample import VERSION
        from spkv_nas.evaluation.micro_batch import check_positions

        questions = Questions.read(str(self.lengths), self.tasks, self.haystack, self.qa)
        check_positions(setting.dense, questions.lengths[-1], "lengths")
        make = questions.maker(_FIRST_SEED + setting.seed, setting.tokenizer)
        words = version("wonderwords")
        return QuestionRounds(
            questions.cells,
            make,
            setting.tokenizer,
            number=self.questions,
            seed=setting.seed,
            identity=f"{VERSION} {_FIRST_SEED} {words} {questions.material.identity}",
        )


RULER = RulerQuestions()
