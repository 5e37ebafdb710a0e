"""What the user brings to RULER: essays to hide needles in, and questions on documents, neither of which is shipped."""

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
    """Essays, and questions by task; without essays RULER's noise takes their place."""

    essays: Essays | None = None
    questions: Mapping[str, Questions] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Hexadecimal SHA-256 of all of it."""
        return hashlib.sha256(repr(self).encode("utf-8", "surrogateescape")).hexdigest()

    @classmethod
    def read(cls, haystack: Sequence[str], questions: Sequence[str]) -> Material:
        """From files. Raises ``UserError`` where one is not what it should be, or two are of one form."""
        found: dict[str, Questions] = {}
        for file in questions:
            read = Questions.read(Path(file))
            if read.task in found:
                raise UserError(f"--qa {file}: another file of this form was given; {read.task} takes one")
            found[read.task] = read
        return cls(Essays.read(haystack) if haystack else None, found)
