"""User-supplied material for RULER: essays to hide needles in, and questions on documents; neither is shipped."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spkv_nas.base.errors import UserError
from spkv_nas.data.ruler.haystacks import Essays
from spkv_nas.data.ruler.questions import Questions


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
    def read(cls, haystack: Sequence[str], questions: Sequence[str]) -> Material:
        """Read the material from files.

        Raises:
            UserError: if a file is malformed, or two question files have the same form.
        """
        questions_by_task: dict[str, Questions] = {}
        for file in questions:
            file_questions = Questions.read(Path(file))
            if file_questions.task in questions_by_task:
                raise UserError(
                    f"--qa {file}: {file_questions.task} takes one file, and another of its format was given"
                )
            questions_by_task[file_questions.task] = file_questions
        return cls(Essays.read(haystack) if haystack else None, questions_by_task)
