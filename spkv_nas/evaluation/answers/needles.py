"""Make questions about numbers that a long text hides, in a model's own chat template, as RULER hides them.

A conversation asks for one number, for two of four, or for one of four and then, in a second turn, for another. Models
without a chat template continue the text. Noise fills the context.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from random import Random

from transformers import PreTrainedTokenizerBase

from spkv_nas.base import errors, special_tokens
from spkv_nas.data.ruler import sample, tasks, words
from spkv_nas.evaluation.answers import judges
from spkv_nas.evaluation.answers.conversations import encode
from spkv_nas.evaluation.answers.questions import Conversation, Turn
from spkv_nas.evaluation.answers.rounds import AnswerRounds
from spkv_nas.evaluation.verdict import criterion

LEAST_FOUND = 0.6  # share of the numbers that a model must find to judge hybrids of it by them
_EARLY_SHARE = 0.25  # below it, the first round is enough to say that it does not
_CHECKED_ROUNDS = 4
_VERSION = 1  # of the text of questions
# Number of needles, and those that each turn asks for
_KINDS: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = (
    (1, ((0,),)),
    (4, ((0, 1),)),
    (4, ((0,), (1,))),
)
_SPARE = 8  # tokens that an answer may have besides its numbers
_HEAD = "Remember the magic numbers that this text names. You will be asked for them.\n"


@dataclass(frozen=True)
class NeedleQuestions:
    """Questions that fill ``length`` tokens together with their answers; they are made when they are asked."""

    tokenizer: PreTrainedTokenizerBase
    length: int
    number: int
    seed: int

    def __len__(self) -> int:
        """Return how many there are."""
        return self.number

    def __getitem__(self, part: slice) -> Sequence[Conversation]:
        """Return some of them. Raises ``UserError`` if one does not fit."""
        return [self._conversation(index) for index in range(*part.indices(self.number))]

    @property
    def identity(self) -> str:
        """Return a text that tells the questions from others, also from those in the tokens of another tokenizer."""
        [first] = self[:1]
        tokens = hashlib.sha256(repr(encode(first, self.tokenizer)).encode()).hexdigest()
        return f"needles {_VERSION} {version('wonderwords')} {self.length} {self.seed} {tokens}"

    @cached_property
    def new_tokens(self) -> int:
        """Return the maximum number of tokens of an answer."""
        longest = sample.continuation(["8888888"] * 2)
        return len(special_tokens.encode_text(longest, self.tokenizer)["input_ids"]) + _SPARE

    def _conversation(self, index: int) -> Conversation:
        """Return a conversation with as much noise as fits."""
        rng = Random(f"{self.seed}/needles/{index}")
        number, asked = rng.choice(_KINDS)
        # Draw the needles and their places
        seen: set[str] = set()
        keys = [words.new(partial(words.word_pair, rng), seen) for _ in range(number)]
        values = [words.number(rng) for _ in keys]
        needles = [
            f"A magic number of {key} is {value}." for key, value in zip(keys, values, strict=True)
        ]
        depths = [rng.random() for _ in needles]
        # Word the questions
        is_chat = bool(getattr(self.tokenizer, "chat_template", None))
        turns = []
        for numbers in asked:
            named = " and ".join(keys[each] for each in numbers)
            subject = "magic numbers" if len(numbers) > 1 else "magic number"
            verb = "are" if len(numbers) > 1 else "is"
            turns.append(
                Turn(
                    prompt=f"\nWhat {verb} the {subject} of {named}?",
                    judge=judges.ContainedShare(tuple(values[each] for each in numbers)),
                    opening=f"{'' if is_chat else chr(10)}In the text the {subject} of {named} {verb}",
                )
            )
        first, *others = turns

        def render(size: int) -> str:
            return f"{_HEAD}{tasks.hide(tasks.noise(size), needles, depths)}{first.prompt}"

        def conversation(text: str) -> Conversation:
            asking = Turn(text, first.judge, opening=first.opening)
            messages = ({"role": "user", "content": text},) if is_chat else ()
            return Conversation(f"needles {index}", (asking, *others), messages)

        # Leave room for the chat template, later turns and answers
        request = sample.Request("needles", self.seed, index, 0, self.tokenizer)
        shortest = render(1)
        fixed = encode(conversation(shortest), self.tokenizer).num_tokens
        fixed += len(turns) * self.new_tokens - request.count(f"{shortest}\n{first.opening}")
        request = sample.Request("needles", self.seed, index, self.length - fixed, self.tokenizer)
        filled = sample.fill(request, render, first.opening, (), new_tokens=0)
        return conversation(filled.prompt)


class NeedleRounds(AnswerRounds):
    """Shares of the hidden numbers that models find, in short rounds, so that a model that finds none is soon known."""

    size = 4

    def __init__(self, questions: NeedleQuestions, setting: criterion.Setting) -> None:
        """Ask the questions."""
        super().__init__(questions, setting, questions.new_tokens, questions.identity)
        self._length = questions.length
        self._reporter = setting.reporter

    def check_dense(self, score: criterion.DenseScore) -> None:
        """Raise ``UserError`` if the dense model finds less than 60 % of the numbers of the first questions."""
        total = min(_CHECKED_ROUNDS, self.num_rounds)
        with self._reporter.bar("asking the dense model") as bar:
            for number in range(1, total + 1):
                share = score(number).mean()
                bar(number, total)
                if share < _EARLY_SHARE:
                    break
        if share < LEAST_FOUND:
            raise errors.UserError(
                f"needles: the dense model finds {100 * share:.0f} % of the numbers that "
                f"{self._length:,} tokens hide, less than {100 * LEAST_FOUND:.0f} %, "
                "so it is no judge of what a hybrid finds\n"
                "judge by recall=10, passages of your text that occur again"
            )

    def note(self, pairs: criterion.Float, details: criterion.Details) -> str:
        """Return how many of the numbers both models find, and at which length."""
        percent, dense_percent = 100.0 * pairs.mean(0)
        return (
            f"finds {percent:.1f} % of the numbers that {self._length:,} tokens hide, "
            f"dense model {dense_percent:.1f} %"
        )
