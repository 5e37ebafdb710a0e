"""Read files of questions on documents, in the form of SQuAD (RULER's ``qa_1``) or of HotpotQA (``qa_2``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import parse_json, read_text

SQUAD, HOTPOT = "qa_1", "qa_2"  # task for each form of file
_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Question:
    """A question on documents.

    Attributes:
        text: the question.
        answers: answers, any one of which suffices.
        documents: indices of the documents that it needs.
        related: indices of related documents.
    """

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """The documents of a file, and the questions on them."""

    task: str
    documents: tuple[str, ...]
    questions: tuple[Question, ...]

    @classmethod
    def read(cls, file: Path) -> Questions:
        """Read a file in the form of SQuAD or HotpotQA.

        Raises:
            UserError: if it has neither form, or no question has an answer.
        """
        # Parse either format, and check that every text can be encoded
        try:
            content = parse_json(read_text(file, "questions", max_bytes=_MAX_BYTES))
            questions = _squad(content["data"]) if isinstance(content, dict) else _hotpot(content)
            for text in (*questions.documents, *(t for q in questions.questions for t in (q.text, *q.answers))):
                text.encode()  # fails for what a tokenizer does not encode: other types, and lone surrogates
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"--qa {file}: neither in SQuAD format (an object with 'data') nor HotpotQA format (a list with "
                "'context')"
            ) from error
        if not questions.questions:
            raise UserError(f"--qa {file}: no question has an answer")
        return questions


def _squad(articles: list[dict[str, Any]]) -> Questions:
    """Convert SQuAD; the other paragraphs of an article are related to a question's documents."""
    texts: dict[str, int] = {}
    questions = []
    for article in articles:
        # Number the distinct paragraphs
        numbers = [texts.setdefault(paragraph["context"], len(texts)) for paragraph in article["paragraphs"]]
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
        numbers = tuple(dict.fromkeys(texts.setdefault(paragraph, len(texts)) for paragraph in paragraphs))
        questions.append(Question(row["question"], (row["answer"],), numbers))
    return Questions(HOTPOT, tuple(texts), tuple(questions))
