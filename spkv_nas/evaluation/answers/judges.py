"""Judge the text of one answer: by exact match, a pattern, a JSON Schema, or a tool call; each score is 0 to 1."""

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

Object = dict[str, Any]  # of JSON
# What may stand around an answer that is the same without it
_EDGES = " \t\n.,;:!?\"'`*_()[]\u201c\u201d\u2018\u2019\u00ab\u00bb"
_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


class Judge(Protocol):
    """Score texts of answers to one question."""

    def score(self, text: str) -> float:
        """Return the score of an answer, 0 to 1."""


@dataclass(frozen=True)
class ExactMatch:
    """Accept texts that equal any of the answers, after normalisation; of a continuation, its first line counts."""

    answers: tuple[str, ...]
    first_line: bool = False

    def score(self, text: str) -> float:
        """Return 1 for a match, else 0."""
        if self.first_line:
            text = text.strip().partition("\n")[0]
        return float(normalized(text) in map(normalized, self.answers))


def normalized(text: str) -> str:
    """Return a text in lower case and Unicode's form NFKC, with single spaces, without punctuation at its ends."""
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return " ".join(words).strip(_EDGES)


@dataclass(frozen=True)
class PatternMatch:
    """Accept texts in which a regular expression matches anywhere."""

    pattern: str

    def score(self, text: str) -> float:
        """Return 1 for a match, else 0."""
        return float(re.search(self.pattern, text) is not None)


@dataclass(frozen=True)
class ContainedShare:
    """Score texts by the share of values that they contain, as RULER does."""

    values: tuple[str, ...]

    def score(self, text: str) -> float:
        """Return the share."""
        return sum(value in text for value in self.values) / len(self.values)


@dataclass(frozen=True, eq=False)
class SchemaFit:
    """Accept texts that are JSON, which may stand in a code fence, and that fit a JSON Schema."""

    schema: Object | bool

    @cached_property
    def _validator(self) -> Any:
        """Return the validator of the draft that the schema names, which loads no other schemas."""
        import jsonschema
        from referencing import Registry

        kind = jsonschema.validators.validator_for(self.schema)
        return kind(self.schema, registry=Registry())

    def check(self) -> None:
        """Raise an error of jsonschema if the schema is none."""
        self._validator.check_schema(self.schema)

    def score(self, text: str) -> float:
        """Return 1 for JSON that fits, else 0."""
        fenced = _FENCED.fullmatch(text.strip())
        try:
            value = json.loads(text if fenced is None else fenced.group(1))
        except (ValueError, RecursionError):
            return 0.0
        return float(self._validator.is_valid(value))


@dataclass(frozen=True, eq=False)
class ToolCall:
    """Accept texts whose first JSON object with a name is a call of a tool with certain arguments.

    Models write ``{"name": ..., "arguments": {...}}``, or "parameters" in place of "arguments", within marks of their
    own.
    """

    name: str
    arguments: Object

    def score(self, text: str) -> float:
        """Return 1 if name and arguments are the same, else 0."""
        call = next((value for value in _objects(text) if "name" in value), {})
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = next(_objects(arguments), {})
        return float(call.get("name") == self.name and arguments == self.arguments)


def _objects(text: str) -> Iterator[Object]:
    """Yield the outermost JSON objects of a text, and those of its lists."""
    decoder = json.JSONDecoder()
    start = text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            yield value
        start = text.find("{", end)


def described(judge: Judge | None) -> str:
    """Return a text of what a judge accepts, for the identity of samples."""
    if judge is None:
        return ""
    return f"{type(judge).__name__} {vars(judge)}"
