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
        from spkv_nas.evaluation.answers.rounds import AnswerRounds

        return AnswerRounds(self._questions(), setting, self.new_tokens)

    def _questions(self) -> "list[Conversation]":
        """Read the file."""
        from spkv_nas.evaluation.answers.questions import read_questions

        if self.file is None:
            raise UserError("--margin answers=... needs questions: answers=5:file=questions.jsonl")
        return read_questions(Path(self.file))
