"""Define the criteria of a verdict that judge answers which models write."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from spkv_nas.base import limits
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.evaluation.verdict import criterion

if TYPE_CHECKING:
    from spkv_nas.evaluation.answers.questions import Conversation

# Of an answer by default: a paragraph
_NEW_TOKENS = 256
_QUESTIONS = 2000  # as of RULER's
_LENGTH = 2048  # of needles without a text, at most
# Other questions than RULER's of the same seed
_FIRST_SEED = 1 << 42

File = Annotated[
    str | None,
    Flag(
        "JSON Lines, each with messages or a prompt, and answer, pattern, choices, schema or call, or none of them.",
        metavar="FILE",
    ),
]
NewTokens = Annotated[
    int, Flag("Maximum number of tokens of an answer.", low=1, high=limits.MAX_BLOCK_SIZE)
]

Length = Annotated[
    int | None,
    Flag("Tokens of a text with its question and answer.", low=32, high=limits.MAX_BLOCK_SIZE),
]


@dataclass(frozen=True)
class Answers(criterion.Criterion):
    """Drop of the mean score of answers to a user's questions."""

    name = "answers"
    help = "drop of the mean score of written answers to your questions, in percentage points"
    title = "Answers to questions"
    noun = "conversations"
    reads_text = False
    test = criterion.MeanDrop()

    file: File = default(None, "none")
    new_tokens: NewTokens = _NEW_TOKENS

    def check(self) -> None:
        """Check that there is a file, and every line of it."""
        self._questions()

    def prepare(self, setting: criterion.Setting) -> criterion.Rounds:
        """Return the conversations of the file, in random order."""
        from spkv_nas.evaluation.answers.rounds import AnswerRounds, in_random_order

        questions, identity = in_random_order(self._questions(), setting, self.new_tokens)
        return AnswerRounds(questions, setting, self.new_tokens, identity)

    def _questions(self) -> "list[Conversation]":
        """Read the file."""
        from spkv_nas.evaluation.answers.questions import read_questions

        if self.file is None:
            raise UserError("--margin answers=... needs questions: answers=5:file=questions.jsonl")
        return read_questions(Path(self.file))


@dataclass(frozen=True)
class Needles(criterion.Criterion):
    """Drop of the share of numbers that a model finds in long texts, by written answers in its own chat template."""

    name = "needles"
    help = "drop of the share of numbers found that long texts hide, in percentage points"
    title = "Needles in its chat template"
    noun = "conversations"
    reads_text = False
    test = criterion.MeanDrop()

    length: Length = default(None, "the context of the text")

    def prepare(self, setting: criterion.Setting) -> criterion.Rounds:
        """Return the questions, at the context of the text; without a text at 2,048 tokens, or the model's context."""
        from spkv_nas.evaluation.answers.needles import NeedleQuestions, NeedleRounds
        from spkv_nas.evaluation.micro_batch import check_positions

        length = self.length
        if length is None and setting.text is not None:
            length = setting.text.block_size
        if length is None:
            positions = setting.dense.config.get_text_config().max_position_embeddings
            length = min(_LENGTH, positions)
        check_positions(setting.dense, length, "length")
        questions = NeedleQuestions(
            setting.tokenizer, length, _QUESTIONS, _FIRST_SEED + setting.seed
        )
        return NeedleRounds(questions, setting)
