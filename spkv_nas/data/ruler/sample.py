"""A sample of RULER (arXiv 2404.06654), and how any task fills the length that it is asked for.

A task says what its prompt is with ``n`` units (sentences, words, documents); how many there is room for the tokenizer
decides. As in RULER the length covers the prompt, the beginning of the answer, and the tokens that may be generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING

from spkv_nas.base.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 2  # of the text of samples, raised when it changes; 1 had spaces for line breaks in noise
_ENOUGH, _AIM = 0.02, 0.01  # of the length may stay empty; what a guess aims at
_FIRST, _GROWTH = 4, 16  # units of the first guess, and how many times as many the next may have
_GUESSES, _TRIES = 16, 64  # by tokens per unit so far, before bisection, which 2^24 units take 24 of


@dataclass(frozen=True)
class Sample:
    """One question with its text.

    Attributes:
        prompt: text and question.
        answer_prefix: how the answer begins, on a line of its own.
        answers: what must be in it; of questions on documents, any of which will do.
        num_tokens: of prompt and prefix, special tokens included.
        new_tokens: that may be generated: RULER's number, or the answer's own where the tokenizer needs more.
    """

    task: str
    prompt: str
    answer_prefix: str
    answers: tuple[str, ...]
    num_tokens: int
    new_tokens: int

    @property
    def text(self) -> str:
        """What a model continues."""
        return f"{self.prompt}\n{self.answer_prefix}"

    @property
    def continuation(self) -> str:
        """How a model should: all answers in their order."""
        return continuation(self.answers)


def continuation(answers: Sequence[str]) -> str:
    """What follows the beginning of an answer."""
    return f" {', '.join(answers)}"


class NoRoomError(UserError):
    """A length in which not even the least of a task fits."""


@dataclass(frozen=True)
class Request:
    """Which sample of which task is asked for, and how many tokens it may take with its answer.

    ``is_answered`` says that the answer is known, as in training, so that it needs no more room than it takes.
    """

    task: str
    seed: int
    index: int
    length: int
    tokenizer: PreTrainedTokenizerBase
    is_answered: bool = False

    @cached_property
    def rng(self) -> Random:
        """The sample's own random numbers, the same in every process."""
        return Random(f"{self.seed}/{self.task}/{self.index}/{self.length}")

    def count(self, text: str) -> int:
        """Tokens of a text as a model is given it."""
        return len(self.tokenizer(text, verbose=False)["input_ids"])


def fill(
    request: Request,
    render: Callable[[int], str],
    answer_prefix: str,
    answers: Sequence[str],
    *,
    new_tokens: int,
    least: int = 1,
    most: int | None = None,
) -> Sample:
    """The sample with as many units as fit, but for at most 2 % of the length.

    Args:
        render: the prompt with so many units.
        answers: what is to be found.
        new_tokens: RULER's number for the task.
        least: units without which there is no task.
        most: units that there are; None: any number, each of at least a token.

    Raises:
        NoRoomError: the least does not fit.
    """
    written = len(request.tokenizer(continuation(answers), add_special_tokens=False)["input_ids"])
    room = written + 1 if request.is_answered else max(new_tokens, written)  # with the token that ends it

    def sample(number: int) -> Sample:
        made = Sample(request.task, render(number), answer_prefix, tuple(answers), 0, room)
        return replace(made, num_tokens=request.count(made.text))

    limit = request.length - room
    best = sample(least)
    if best.num_tokens > limit:
        raise NoRoomError(
            f"RULER's {request.task} needs at least {best.num_tokens + room} tokens with this tokenizer: "
            f"{request.length} are too few"
        )
    low, high = least, (limit if most is None else most) + 1  # units that fit, units that do not
    guess = least + _FIRST
    for attempt in range(_TRIES):
        if high - low <= 1 or best.num_tokens >= limit - _ENOUGH * request.length:
            break
        guess = min(max(guess, low + 1), high - 1) if attempt < _GUESSES else (low + high) // 2
        tried = sample(guess)
        per_unit = max((tried.num_tokens - best.num_tokens) / (guess - low), 0.1)
        if tried.num_tokens <= limit:
            best, low = tried, guess
        else:
            high = guess
        wanted = limit - _AIM * request.length - best.num_tokens
        guess = min(low + int(wanted / per_unit), _GROWTH * max(low, _FIRST))
    return best


def first_fitting(makes: Iterable[Callable[[], Sample]]) -> Sample:
    """The sample of the first of ``makes`` that has room. Raises ``NoRoomError``, that of the last, where none has."""
    error: NoRoomError | None = None
    for make in makes:
        try:
            return make()
        except NoRoomError as found:
            error = found
    assert error is not None
    raise error
