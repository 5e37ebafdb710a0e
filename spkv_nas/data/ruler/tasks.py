"""Generate samples of RULER's 13 tasks, by RULER's names.

    generate("niah_single_1", seed=0, index=7, length=4096, tokenizer=tokenizer)

The same arguments give the same bytes in every process. ``index`` counts samples; another seed gives other samples. The
classes say how the tasks are as in RULER, and how they differ from it, besides the wording.
"""

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, pairwise
from random import Random
from typing import NamedTuple, Protocol

from spkv_nas.base.errors import UserError
from spkv_nas.data.ruler import words
from spkv_nas.data.ruler.material import HOTPOT, SQUAD, Haystack, Material, Question, Questions
from spkv_nas.data.ruler.sample import Request, Sample, fill, first_fitting
from spkv_nas.data.tokenizer import Tokenizer

_DRAW: dict[str, Callable[[Random], str]] = {
    "word": words.word_pair,
    "number": words.number,
    "uuid": words.uuid,
}
_LINE_BREAK = "\n"  # between lines of noise or needles
_SPACE = " "  # between sentences of essays
_NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
_LETTERS = 5
_EXAMPLE_LETTERS = 3
_EXAMPLE_SENTENCES = 10
_MIN_SENTENCES = 10
_LONG = 4096  # tokens from which the form with most repetitions is tried
_ENTRY_TOKENS = 3  # minimum tokens per entry of the list: number, full stop, word
_DOTS = "..."
_TRIES = 100  # maximum number of questions tried until one fits
_DOCUMENT_TOKENS = 16  # minimum tokens per document; bounds how many are drawn
NO_MATERIAL = Material()


class Task(Protocol):
    """Generator of a task's samples."""

    def generate(self, request: Request, _material: Material, /) -> Sample:
        """Generate the requested sample."""


def noise(number: int) -> list[str]:
    """Repeat RULER's noise, five sentences a line, up to ``number`` sentences; the last line may break off."""
    sentences = _NOISE * (number // len(_NOISE) + 1)
    return [
        " ".join(sentences[start : min(start + len(_NOISE), number)])
        for start in range(0, number, len(_NOISE))
    ]


def hide(
    parts: Sequence[str],
    needles: Sequence[str],
    depths: Sequence[float],
    separator: str = _LINE_BREAK,
) -> str:
    """Join the parts of a haystack, with each needle at its depth; needles at the same position keep their order.

    A needle at depth ``d`` in [0, 1) comes before part ``floor(d * (parts + 1))``, whatever the length. Parts are lines
    of noise or of other needles, joined by line breaks, or sentences of essays, joined by spaces, as in RULER.
    """
    positions = sorted(
        (int(depth * (len(parts) + 1)), number) for number, depth in enumerate(depths)
    )
    joined: list[str] = []
    done = 0
    for position, number in positions:
        joined += [*parts[done:position], needles[number]]
        done = position
    return separator.join([*joined, *parts[done:]])


@dataclass(frozen=True)
class Needles:
    """Needle in a haystack: one of the eight tasks that ask for values which the text assigns to keys.

    As in RULER: the kinds of keys and values, how many of each are hidden and asked for, values drawn independently, a
    line for each needle in noise or among needles, and 128 new tokens. Different: distinct keys (so that a question has
    one answer), needles at independent uniform depths (RULER draws distinct positions, 40 of them in essays), and
    essays that begin at a random sentence.
    """

    # Or "noise", or "needles": sentences like the hidden one, with other keys
    haystack: str = "essays"
    key: str = "word"  # kind of keys: "word", "number" or "uuid"
    value: str = "number"  # kind of values
    num_keys: int = 1  # number of hidden keys
    num_values: int = 1  # number of values per key
    num_queries: int = 1  # number of keys asked for

    def generate(self, request: Request, material: Material) -> Sample:
        """Generate a sample; noise replaces essays if there are none."""
        rng = request.rng
        seen: set[str] = set()
        draw_key = partial(_DRAW[self.key], rng)
        draw_value = partial(_DRAW[self.value], rng)
        # Draw keys, values, depths and queries
        keys = [words.new(draw_key, seen) for _ in range(self.num_keys)]
        values = [[draw_value() for _ in range(self.num_values)] for _ in keys]
        needles = [
            self._needle(key, value)
            for key, drawn in zip(keys, values, strict=True)
            for value in drawn
        ]
        depths = [rng.random() for _ in needles]
        queried = rng.sample(range(self.num_keys), self.num_queries)
        haystack, separator = self._haystack(rng, seen, material)
        # Word the question
        answers = [value for number in queried for value in values[number]]
        is_plural = len(answers) > 1
        noun = f"magic {self.value}s" if is_plural else f"magic {self.value}"
        verb = "are" if is_plural else "is"
        queried_keys = _listed([keys[number] for number in queried])
        head = (
            f"Remember the magic {self.value}s that this text names. You will be asked for them.\n"
        )
        question = f"\nWhat {verb} the {noun} of {queried_keys}?"

        def render(number: int) -> str:
            text = hide(haystack(number), needles, depths, separator)
            return f"{head}{text}{question}"

        prefix = f"In the text the {noun} of {queried_keys} {verb}"
        return fill(request, render, prefix, answers, new_tokens=128)

    def _needle(self, key: str, value: str) -> str:
        return f"A magic {self.value} of {key} is {value}."

    def _haystack(self, rng: Random, seen: set[str], material: Material) -> tuple[Haystack, str]:
        """Return (parts by number of units, separator); other needles stay the same however many are made."""
        if self.haystack == "essays" and material.essays is not None:
            return material.essays.start(rng), _SPACE
        if self.haystack != "needles":
            return noise, _LINE_BREAK
        # Draw further needles on demand, so that a longer text extends a shorter one
        others: list[str] = []

        def more(number: int) -> list[str]:
            for _ in range(number - len(others)):
                key = words.new(partial(_DRAW[self.key], rng), seen)
                others.append(self._needle(key, _DRAW[self.value](rng)))
            return others[:number]

        return more, _LINE_BREAK


def _listed(names: list[str]) -> str:
    """Join names, for example "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


@dataclass(frozen=True)
class VariableTracking:
    """Variable tracking: find the variables that have a value, assigned from a number or, ``num_hops`` times, another.

    As in RULER: one chain of five variables of five letters (four hops), each assigned on a line between lines of
    noise, 30 new tokens, and a worked example with names of three letters. Different: assignments at independent
    uniform depths, and no example where it does not fit.
    """

    num_hops: int = 4

    def generate(self, request: Request, _material: Material) -> Sample:
        """Generate a sample."""
        rng = request.rng
        # Write the worked example
        render_example, example_prefix, example_names = self._problem(rng, _EXAMPLE_LETTERS)
        example = (
            f"{render_example(_EXAMPLE_SENTENCES)}\n{example_prefix} {', '.join(example_names)}\n\n"
        )
        render, prefix, names = self._problem(rng, _LETTERS)

        def make(text: str) -> Sample:
            return fill(
                request,
                lambda number: f"{text}{render(number)}",
                prefix,
                names,
                new_tokens=30,
                least=_MIN_SENTENCES,
            )

        # Leave the example out if the sample does not fit with it
        return first_fitting(partial(make, text) for text in (example, ""))

    def _problem(self, rng: Random, length: int) -> tuple[Callable[[int], str], str, list[str]]:
        """Create a chain of names of ``length`` letters: (prompt by number of noise sentences, prefix, answers)."""
        seen: set[str] = set()
        draw = partial(words.letters, rng, length, string.ascii_uppercase)
        # Assign a number to the first variable, and each variable to the next
        names = [words.new(draw, seen) for _ in range(self.num_hops + 1)]
        value = rng.randint(10_000, 99_999)
        chain = [
            f"VAR {names[0]} = {value}.",
            *(f"VAR {target} = VAR {source}." for source, target in pairwise(names)),
        ]
        depths = sorted(rng.random() for _ in chain)

        def render(number: int) -> str:
            hidden = hide(noise(number), chain, depths)
            head = "Follow the variables that this text assigns, from a number or from each other."
            return f"{head}\n{hidden}\nQuestion: Which variables have the value {value}?"

        return render, f"Answer: The {len(names)} variables with the value {value} are", names


class _Form(NamedTuple):
    """Word list of ``cwe``: occurrences of common and other words; ``example``: (words, often, seldom) or None."""

    often: int
    seldom: int
    example: tuple[int, int, int] | None


_FORMS = (_Form(30, 3, (40, 10, 3)), _Form(6, 1, (20, 3, 1)), _Form(6, 1, None), _Form(3, 1, None))


@dataclass(frozen=True)
class CommonWords:
    """Common words: find the ``num_common`` words of a numbered list that occur more often than all others.

    As in RULER: ten common words occur 30 times and the others 3 times (below 4,096 tokens 6 times and once), 120 new
    tokens, a worked example with a smaller list. Different: answers separated by commas, at least ten other words,
    smaller forms of the list where RULER's do not fit, and where a list needs more words than exist (8,166) additional
    pairs such as "quiet-harbour", where RULER draws all words from a larger list.
    """

    num_common: int = 10
    new_tokens: int = 120

    def generate(self, request: Request, _material: Material) -> Sample:
        """Generate a sample in the first form that fits."""
        forms = _FORMS if request.length >= _LONG else _FORMS[1:]
        return first_fitting(partial(self._make, request, form) for form in forms)

    def _make(self, request: Request, form: _Form) -> Sample:
        rng = request.rng
        prefix = f"Answer: The {self.num_common} most frequent words of the list are"
        # Write the worked example
        example = ""
        if form.example is not None:
            num_words, often, seldom = form.example
            common, others = self._drawn(rng, num_words)
            example = (
                f"{self._prompt(rng, common * often + others * seldom)}\n"
                f"{prefix} {', '.join(common)}\n\n"
            )
        # Draw more words than can fit, and add as many as fit
        max_words = request.length // (_ENTRY_TOKENS * form.seldom)
        common, others = self._drawn(rng, max_words + self.num_common)
        order = rng.getrandbits(64)

        def render(number: int) -> str:
            entries = common * form.often + others[:number] * form.seldom
            return example + self._prompt(Random(order), entries)

        least = self.num_common
        return fill(
            request,
            render,
            prefix,
            common,
            new_tokens=self.new_tokens,
            least=least,
            most=max(least, max_words),
        )

    def _drawn(self, rng: Random, number: int) -> tuple[list[str], list[str]]:
        """Draw ``number`` distinct words, with pairs if there are too few; return (common ones, others)."""
        known = words.all_words()
        drawn = rng.sample(known, min(number, len(known)))
        seen = set(drawn)
        while len(drawn) < number:
            drawn.append(words.new(partial(words.word_pair, rng), seen))
        return drawn[: self.num_common], drawn[self.num_common :]

    def _prompt(self, rng: Random, entries: list[str]) -> str:
        """Return the numbered list, shuffled, with its question."""
        rng.shuffle(entries)
        listed = " ".join(f"{position}. {word}" for position, word in enumerate(entries, 1))
        head = "Some words of this numbered list are in it more often than others. Remember them."
        return (
            f"{head}\n{listed}\nQuestion: Which {self.num_common} words are in the list most often?"
        )


@dataclass(frozen=True)
class FrequentWords:
    """Frequent words: of ``n`` coded words, the one of rank ``k`` occurs ``n k^-exponent / zeta(exponent)`` times.

    As in RULER: words of six letters with a zeta distribution of exponent 2, whose most frequent word is dots, one word
    per fifty tokens of the length, and 50 new tokens. Different: answers separated by commas.
    """

    exponent: float = 2.0
    num_letters: int = 6
    num_answers: int = 3
    tokens_per_word: int = 50
    new_tokens: int = 50

    def generate(self, request: Request, _material: Material) -> Sample:
        """Generate a sample."""
        from scipy.special import zeta  # too slow to import for --help

        rng = request.rng
        # Draw the coded words
        seen: set[str] = set()
        num_words = max(request.length // self.tokens_per_word, self.num_answers + 2)
        coded = [_DOTS]
        while len(coded) < num_words:
            coded.append(words.new(partial(words.letters, rng, self.num_letters), seen))
        # Let their frequencies follow a power law (Zipf)
        total = float(zeta(self.exponent))
        shares = [rank**-self.exponent / total for rank in range(1, num_words + 1)]
        order = rng.getrandbits(64)
        # Rank, from 0, of the last answer, which must occur more often than the next word
        last = self.num_answers

        def render(size: int) -> str:
            entries: list[str] = []
            for word, share in zip(coded, shares, strict=True):
                entries += [word] * int(size * share)
            Random(order).shuffle(entries)
            head = "Count how often each coded word is in this text; the dots are none."
            return (
                f"{head}\n{' '.join(entries)}\n"
                f"Question: Which {last} coded words are there most often?"
            )

        # Make the text long enough that the last answer is more frequent than the next word
        least = math.ceil(1 / (shares[last] - shares[last + 1]))
        prefix = f"Answer: The {last} most frequent coded words are"
        return fill(
            request, render, prefix, coded[1 : last + 1], new_tokens=self.new_tokens, least=least
        )


@dataclass(frozen=True)
class DocumentQuestions:
    """Question answering over documents, with the relevant ones hidden among others; ``form`` is that of their file.

    As in RULER: the question's own documents and others, first of its own article, in random order; 32 new tokens.
    Different: a question whose documents are too long is replaced by another.
    """

    form: str

    def generate(self, request: Request, material: Material) -> Sample:
        """Generate a sample from the question at its index in a random order, or another if that one does not fit."""
        if request.task not in material.questions:
            raise UserError(
                f"RULER's task {request.task} needs documents: "
                f"give --qa FILE.json in {self.form} format"
            )
        questions = material.questions[request.task]
        # Try the question at the sample's index first, then random ones
        order = _order(len(questions.questions), request.seed)
        replacements = (request.rng.randrange(len(order)) for _ in range(_TRIES - 1))
        indices = chain((request.index % len(order),), replacements)
        asked = (questions.questions[order[index]] for index in indices)
        return first_fitting(partial(self._ask, request, questions, question) for question in asked)

    def _ask(self, request: Request, questions: Questions, question: Question) -> Sample:
        rng = request.rng
        related = {*question.documents, *question.related}
        # Choose documents: the question's own, then those of its article, then others
        akin = rng.sample(question.related, len(question.related))
        number = min(len(questions.documents), request.length // _DOCUMENT_TOKENS)
        unrelated = [
            index
            for index in rng.sample(range(len(questions.documents)), number)
            if index not in related
        ]
        chosen = [*question.documents, *akin, *unrelated]
        order = rng.getrandbits(64)

        # Show the first ``number`` of them in random order
        def render(number: int) -> str:
            numbers = chosen[:number]
            Random(order).shuffle(numbers)
            texts = "\n\n".join(
                f"Document {position}:\n{questions.documents[index]}"
                for position, index in enumerate(numbers, 1)
            )
            return (
                "Answer the question from these documents, in a few words.\n"
                f"\n{texts}\n\nQuestion: {question.text}"
            )

        sample = fill(
            request,
            render,
            "Answer:",
            question.answers[:1],
            new_tokens=32,
            least=len(question.documents),
            most=len(chosen),
        )
        return replace(sample, answers=question.answers)


@cache
def _order(number: int, seed: int) -> tuple[int, ...]:
    return tuple(Random(f"{seed}/questions").sample(range(number), number))


_QUESTIONS: dict[str, Task] = {
    SQUAD: DocumentQuestions("SQuAD"),
    HOTPOT: DocumentQuestions("HotpotQA"),
}
TASKS: dict[str, Task] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles(),
    "niah_single_3": Needles(value="uuid"),
    "niah_multikey_1": Needles(num_keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuid", value="uuid"),
    "niah_multivalue": Needles(num_values=4),
    "niah_multiquery": Needles(num_keys=4, num_queries=4),
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    **_QUESTIONS,
}


def available(material: Material) -> list[str]:
    """Return the tasks that can be generated: eleven, and those on documents for which there are questions."""
    return [task for task in TASKS if task not in _QUESTIONS or task in material.questions]


def check_task(task: str) -> None:
    """Raise ``UserError`` unless a task exists."""
    if task not in TASKS:
        raise UserError(f"unknown RULER task '{task}'; expected one of {', '.join(TASKS)}")


def accepts_any(task: str) -> bool:
    """Return True if any one of the answers suffices; other tasks score the share of answers."""
    return task in _QUESTIONS


def generate(
    task: str,
    seed: int,
    index: int,
    length: int,
    tokenizer: Tokenizer,
    material: Material = NO_MATERIAL,
    *,
    is_answered: bool = False,
) -> Sample:
    """Generate sample ``index`` of a task, as ``Request`` describes it.

    Raises ``UserError`` if there is no such task, its documents are missing, or it does not fit in the length.
    """
    check_task(task)
    request = Request(
        task=task,
        seed=seed,
        index=index,
        length=length,
        tokenizer=tokenizer,
        is_answered=is_answered,
    )
    return TASKS[task].generate(request, material)
