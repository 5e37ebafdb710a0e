"""Files of questions on documents, in the form of SQuAD (RULER's ``qa_1``) or of HotpotQA (``qa_2``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import parse_json, read_text

SQUAD, HOTPOT = "qa_1", "qa_2"  # the tasks that each form of a file is for
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Question:
    """A question, the answers any of which will do, and by number the documents that it needs and those akin to it."""

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    akin: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """The documents of a file, and the questions on them."""

    task: str
    documents: tuple[str, ...]
    questions: tuple[Question, ...]

    @classmethod
    def read(cls, file: Path) -> Questions:
        """A file in the form of SQuAD or HotpotQA. Raises ``UserError``: neither, or no question has an answer."""
        try:
            content = parse_json(read_text(file, "questions", most=_MOST_BYTES))
            found = _squad(content["data"]) if isinstance(content, dict) else _hotpot(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"--qa {file}: neither SQuAD's form (an object with 'data') nor HotpotQA's (a list with 'context')"
            ) from error
        if not found.questions:
            raise UserError(f"--qa {file}: no question has an answer")
        return found


def _squad(articles: list[dict[str, Any]]) -> Questions:
    texts: dict[str, int] = {}
    found = []
    for article in articles:
        numbers = [texts.setdefault(one["context"], len(texts)) for one in article["paragraphs"]]
        for number, paragraph in zip(numbers, article["paragraphs"], strict=True):
            akin = tuple(one for one in dict.fromkeys(numbers) if one != number)
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                if answers and not asked.get("is_impossible", False):
                    found.append(Question(asked["question"], answers, (number,), akin))
    return Questions(SQUAD, tuple(texts), tuple(found))


def _hotpot(rows: list[dict[str, Any]]) -> Questions:
    texts: dict[str, int] = {}
    found = []
    for row in rows:
        own = [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]]
        numbers = tuple(dict.fromkeys(texts.setdefault(one, len(texts)) for one in own))
        found.append(Question(row["question"], (row["answer"],), numbers))
    return Questions(HOTPOT, tuple(texts), tuple(found))
