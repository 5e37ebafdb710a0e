"""Criterion ``ruler``: RULER's questions, by generated answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_REPEATS
from spkv_nas.base.units import parse_context
from spkv_nas.contrib.evaluate.ruler.options import Haystack, OptionalLengths, Questions, RulerTasks, check_questions
from spkv_nas.evaluation.verdict.criterion import Criterion, Setting
from spkv_nas.evaluation.verdict.loss_tests import MeanDrop

if TYPE_CHECKING:
    from spkv_nas.evaluation.verdict.rounds import Rounds

QUESTIONS = 2000  # default maximum number of questions
_FIRST_SEED = 1 << 41  # other questions than those of ``evaluate ruler`` and of training, which may have chosen

MaxQuestions = Annotated[int, Flag("Maximum number of questions, over all tasks and lengths.", low=1, high=MAX_REPEATS)]


@dataclass(frozen=True)
class RulerQuestions(Criterion):
    """Drop of the share of correct answers to RULER's questions."""

    name, help, title = "ruler", "drop of RULER's share of correct answers, in percentage points", "RULER"
    noun, reads_text = "questions", False
    test = MeanDrop()

    lengths: OptionalLengths = None
    tasks: RulerTasks = default(None, "all")
    questions: MaxQuestions = QUESTIONS
    haystack: Haystack = default(None, "RULER's noise")
    qa: Questions = default(None, "none; qa_1 and qa_2 are left out")

    def check(self) -> None:
        """Check the lengths, the tasks and the material of RULER."""
        if self.lengths is None:
            raise UserError(
                "--margin ruler=... needs lengths, comma-separated prompt lengths in tokens, such as "
                "ruler=2:lengths=512,4k"
            )
        check_questions(self.lengths, self.tasks, self.haystack, self.qa)

    def prepare(self, setting: Setting) -> Rounds:
        """Return RULER's questions, each of a random task and length."""
        from importlib.metadata import version

        from spkv_nas.contrib.evaluate.ruler.answers import sample_if_it_fits
        from spkv_nas.contrib.evaluate.ruler.rounds import QuestionRounds
        from spkv_nas.data.ruler.material import Material
        from spkv_nas.data.ruler.sample import VERSION
        from spkv_nas.data.ruler.tasks import available
        from spkv_nas.evaluation.micro_batch import check_positions

        # Pair every task with every length
        material = Material.read(self.haystack or [], self.qa or [])
        names = available(material) if self.tasks is None else [name.strip() for name in self.tasks.split(",")]
        lengths = sorted({parse_context(text) for text in str(self.lengths).split(",")})
        cells = [(task, length) for length in lengths for task in dict.fromkeys(names)]
        check_positions(setting.dense, lengths[-1], "lengths")
        seed = _FIRST_SEED + setting.seed
        make = partial(sample_if_it_fits, seed=seed, tokenizer=setting.tokenizer, material=material)
        # Check that each kind of question fits, before hours of work
        for cell in cells:
            make(*cell, 0)
        identity = f"{VERSION} {_FIRST_SEED} {version('wonderwords')} {material.identity}"
        order = {"number": self.questions, "seed": setting.seed}
        return QuestionRounds(cells, make, setting.tokenizer, **order, identity=identity)


RULER = RulerQuestions()
