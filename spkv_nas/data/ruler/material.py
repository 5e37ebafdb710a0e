"""User-supplied material for RULER: essays to hide needles in, and questions on documents; neither is shipped."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from spkv_nas.base import errors, files
from spkv_nas.data.sources import documents, only_texts

# Task for each form of file
SQUAD = "qa_1"
HOTPOT = "qa_2"
_MAX_BYTES = 1 << 30
# Parts of a text, such as lines or sentences, by number of units
Haystack = Callable[[int], list[str]]
_MAX_DOCUMENTS = 1000
_MAX_WORDS = 500_000
_LONGEST = 60  # maximum words per sentence; text without full stops is cut
_MIN_SENTENCES = 20  # minimum number of sentences of essays


@dataclass(frozen=True)
class Essays:
    """Sentences of the user's own text, each as its words; reading continues at the first after the last."""

    sentences: tuple[tuple[str, ...], ...]

    @classmethod
    def read(cls, sources: Sequence[str], asked_by: str = "--haystack") -> "Essays":
        """Read half a million words from files and folders, which the option ``asked_by`` names."""
        all_sentences: list[tuple[str, ...]] = []
        num_words = 0
        for document in islice(only_texts(documents([*sources], Path()), asked_by), _MAX_DOCUMENTS):
            sentences = list(_sentences(document.text))
            all_sentences += sentences
            num_words += sum(map(len, sentences))
            if num_words >= _MAX_WORDS:
                break
        if len(all_sentences) < _MIN_SENTENCES:
            raise errors.UserError(
                f"{asked_by} {', '.join(sources)}: "
                f"{len(all_sentences)} sentences; at least {_MIN_SENTENCES} are "
                "needed to hide needles"
            )
        return cls(tuple(all_sentences))

    def start(self, rng: Random) -> Haystack:
        """Return the haystack that begins at a random sentence; a unit is a word, and the last sentence may be cut."""
        first = rng.randrange(len(self.sentences))

        def haystack(number: int) -> list[str]:
            parts: list[str] = []
            while number > 0:
                words = self.sentences[(first + len(parts)) % len(self.sentences)]
                parts.append(" ".join(words[:number]))
                number -= len(words)
            return parts

        return haystack


def _sentences(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the sentences of a text, cut after full stops, question and exclamation marks."""
    for sentence in re.split(r"(?<=[.!?])\s+", text.strip()):
        words = sentence.split()
        for start in range(0, len(words), _LONGEST):
            yield tuple(words[start : start + _LONGEST])


@dataclass(frozen=True)
class Question:
    """A question on documents; any one of the answers suffices."""

    text: str  # the question
    answers: tuple[str, ...]  # its answers
    documents: tuple[int, ...]  # indices of the documents that it needs
    related: tuple[int, ...] = ()  # indices of related documents


@dataclass(frozen=True)
class Questions:
    """The documents of a file, and the questions on them."""

    task: str
    documents: tuple[str, ...]
    questions: tuple[Question, ...]

    @classmethod
    def read(cls, file: Path) -> "Questions":
        """Read a file in the form of SQuAD or HotpotQA; ``UserError`` for others, or if no question has an answer."""
        # Parse either format, and check that every text can be encoded
        try:
            content = files.parse_json(files.read_text(file, "questions", max_bytes=_MAX_BYTES))
            questions = _squad(content["data"]) if isinstance(content, dict) else _hotpot(content)
            for text in (
                *questions.documents,
                *(t for q in questions.questions for t in (q.text, *q.answers)),
            ):
                # Fails for what a tokenizer does not encode: other types, and lone surrogates
                text.encode()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, errors.UserError):
                raise
            raise errors.UserError(
                f"--qa {file}: "
                "neither in SQuAD format (an object with 'data') nor HotpotQA format (a list with "
                "'context')"
            ) from error
        if not questions.questions:
            raise errors.UserError(f"--qa {file}: no question has an answer")
        return questions


def _squad(articles: list[dict[str, Any]]) -> Questions:
    """Convert SQuAD; the other paragraphs of an article are related to a question's documents."""
    texts: dict[str, int] = {}
    questions = []
    for article in articles:
        # Number the distinct paragraphs
        numbers = [
            texts.setdefault(paragraph["context"], len(texts))
            for paragraph in article["paragraphs"]
        ]
        for number, paragraph in zip(numbers, article["paragraphs"], strict=True):
            related = tuple(other for other in dict.fromkeys(numbers) if other != number)
            # Collect the questions that have an answer
            for question in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in question["answers"]))
                if answers and not question.get("is_impossible", False):
                    questions.append(Question(question["question"], answers, (number,), related))
    return Questions(SQUAD, tuple(texts), tuple(questions))


def _hotpot(rows: list[dict[str, Any]]) -> Questions:
    """Convert HotpotQA, where each question has its own documents."""
    texts: dict[str, int] = {}
    questions = []
    for row in rows:
        paragraphs = [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]]
        numbers = tuple(
            dict.fromkeys(texts.setdefault(paragraph, len(texts)) for paragraph in paragraphs)
        )
        questions.append(Question(row["question"], (row["answer"],), numbers))
    return Questions(HOTPOT, tuple(texts), tuple(questions))


@dataclass(frozen=True)
class Material:
    """Essays, and questions by task; without essays RULER's noise is used instead."""

    essays: Essays | None = None
    questions: Mapping[str, Questions] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Return the SHA-256 of the material as hexadecimal."""
        return hashlib.sha256(repr(self).encode("utf-8", "surrogateescape")).hexdigest()

    @classmethod
    def read(cls, haystack: Sequence[str], questions: Sequence[str]) -> "Material":
        """Read the material; ``UserError`` for a malformed file, or two files of questions of the same form."""
        questions_by_task: dict[str, Questions] = {}
        for file in questions:
            file_questions = Questions.read(Path(file))
            if file_questions.task in questions_by_task:
                raise errors.UserError(
                    f"--qa {file}: {file_questions.task} takes one file, "
                    "and another of its format was given"
                )
            questions_by_task[file_questions.task] = file_questions
        return cls(Essays.read(haystack) if haystack else None, questions_by_task)
