"""Generate samples of RULER (arXiv 2404.06654) that fill a given number of tokens.

A task renders its prompt with ``n`` units (sentences, words, documents); ``fill`` finds how many fit. As in RULER, the
length covers the prompt, the beginning of the answer, and the tokens that may be generated.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from spkv_nas.base import special_tokens
from spkv_nas.base.errors import UserError
from spkv_nas.data.tokenizer import Tokenizer

VERSION = 2  # version of the text of samples; 1 had spaces instead of line breaks in noise
_ENOUGH = 0.02  # share of the length that may stay empty
_AIM = 0.01  # share of it that a guess aims for
_FIRST = 4  # units of the first guess
_GROWTH = 16  # maximum growth factor of the next one
_GUESSES = 16  # by tokens per unit, before bisection
_TRIES = 64  # in all; bisection takes 24 for 2^24 units


@dataclass(frozen=True)
class Sample:
    """One RULER question with its text."""

    task: str  # name of the task
    prompt: str  # text and question
    answer_prefix: str  # beginning of the answer, on a line of its own
    answers: tuple[str, ...]  # the answer must contain all, for questions on documents any of them
    num_tokens: int  # tokens of prompt and prefix, including special tokens
    # Maximum tokens to generate: RULER's number, or that of the answer if the tokenizer needs more
    new_tokens: int

    @property
    def text(self) -> str:
        """Return the text that a model continues."""
        return f"{self.prompt}\n{self.answer_prefix}"

    @property
    def continuation(self) -> str:
        """Return the ideal continuation: all answers in order."""
        return continuation(self.answers)


def continuation(answers: Sequence[str]) -> str:
    """Return the text that continues the beginning of an answer."""
    return f" {', '.join(answers)}"


class NoRoomError(UserError):
    """A length in which not even the smallest sample of a task fits."""


@dataclass(frozen=True)
class Request:
    """Request for sample ``index`` of a task, of at most ``length`` tokens including those of the answer.

    If the answer is known (``is_answered``), as in training, only its own tokens are reserved.
    """

    task: str
    seed: int
    index: int
    length: int
    tokenizer: Tokenizer
    is_answered: bool = False

    @cached_property
    def rng(self) -> Random:
        """Return the sample's own random generator, the same in every process."""
        return Random(f"{self.seed}/{self.task}/{self.index}/{self.length}")

    def count(self, text: str) -> int:
        """Return the number of tokens of a text as model input."""
        return len(
            special_tokens.encode_text(text, self.tokenizer, add_special_tokens=True)["input_ids"]
        )


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
    """Return the sample with as many units as fit, leaving at most 2 % of the length empty.

    ``render`` returns the prompt with a number of units, at least ``least``, for which ``NoRoomError`` is raised if
    they do not fit, and at most ``most``; None for any number, each of at least one token. ``new_tokens`` is RULER's
    maximum of generated tokens for the task.
    """
    # Reserve tokens for the answer, and one for the end-of-text token after a known answer
    answer_tokens = len(
        special_tokens.encode_text(continuation(answers), request.tokenizer)["input_ids"]
    )
    reserved = answer_tokens + 1 if request.is_answered else max(new_tokens, answer_tokens)

    def sample(number: int) -> Sample:
        rendered = Sample(request.task, render(number), answer_prefix, tuple(answers), 0, reserved)
        return replace(rendered, num_tokens=request.count(rendered.text))

    # Check that the smallest sample fits
    limit = request.length - reserved
    best = sample(least)
    if best.num_tokens > limit:
        raise NoRoomError(
            f"RULER's {request.task} needs at least "
            f"{best.num_tokens + reserved} tokens with this tokenizer: "
            f"{request.length} are too few"
        )
    # Search for the largest number of units that fits: guess by tokens per unit, then bisect
    low = least  # units that fit
    high = (limit if most is None else most) + 1  # units that do not
    guess = least + _FIRST
    for attempt in range(_TRIES):
        if high - low <= 1 or best.num_tokens >= limit - _ENOUGH * request.length:
            break
        guess = min(max(guess, low + 1), high - 1) if attempt < _GUESSES else (low + high) // 2
        candidate = sample(guess)
        per_unit = max((candidate.num_tokens - best.num_tokens) / (guess - low), 0.1)
        if candidate.num_tokens <= limit:
            best = candidate
            low = guess
        else:
            high = guess
        # Guess how many units fill the missing tokens
        missing_tokens = limit - _AIM * request.length - best.num_tokens
        guess = min(low + int(missing_tokens / per_unit), _GROWTH * max(low, _FIRST))
    return best


def first_fitting(makes: Iterable[Callable[[], Sample]]) -> Sample:
    """Return the first sample of ``makes`` that fits; the ``NoRoomError`` of the last one if none does."""
    error: NoRoomError | None = None
    for make in makes:
        try:
            return make()
        except NoRoomError as last_error:
            error = last_error
    assert error is not None
    raise error
