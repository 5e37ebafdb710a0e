"""Read questions that a verdict is to judge answers to.

The file is JSON Lines, one conversation a line, such as::

    {"prompt": "The capital of France is", "answer": "Paris"}
    {"messages": [{"role": "user", "content": "2 + 2?"}], "pattern": "(four|4)"}
    {"messages": [...], "choices": ["yes", "no"], "answer": "yes", "then": [{"prompt": "Why?"}]}
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from spkv_nas.base import errors, files, schema
from spkv_nas.evaluation.answers import judges

Object = judges.Object
_MAX_BYTES = 1 << 30
_JUDGES = ("answer", "pattern", "schema", "call")


@dataclass(frozen=True)
class Turn:
    """One question of a conversation: its text, how the answer is judged, and which answers are possible.

    Without a judge, the dense model's own answer counts. Without choices, any text is possible.
    """

    prompt: str  # next message of the user, or text that is continued; "" for the first of a chat
    judge: judges.Judge | None
    choices: tuple[str, ...] = ()
    opening: str = ""  # beginning of the answer that is given to the model


@dataclass(frozen=True)
class Conversation:
    """Questions that follow each other in one context."""

    where: str  # for errors
    turns: tuple[Turn, ...]
    messages: tuple[Object, ...] = ()  # up to the first question; empty: texts are continued
    tools: tuple[Object, ...] = ()  # for the chat template


class Call(schema.Section):
    """Tool call that is expected."""

    name: str
    arguments: Object = Field(default_factory=dict)


class Asked(schema.Section):
    """Keys of a question that say how its answer is judged."""

    answer: str | list[str] | None = None
    pattern: str | None = None
    choices: list[str] | None = None
    fits: Object | bool | None = Field(None, alias="schema")
    call: Call | None = None

    def turn(self, where: str, prompt: str, *, is_chat: bool) -> Turn:
        """Return the question. Raises ``UserError`` if its keys contradict each other."""
        named = [key for key in _JUDGES if self._values[key] is not None]
        if len(named) > 1:
            raise errors.UserError(f"{where}: {' and '.join(named)}: keep one of them")
        choices = tuple(self.choices or ())
        if self.choices is not None:
            self._check_choices(where, choices, named)
        return Turn(prompt, self._judge(where, is_chat=is_chat), choices)

    @property
    def _values(self) -> dict[str, object]:
        """Return the judging keys with their values."""
        return {
            "answer": self.answer,
            "pattern": self.pattern,
            "schema": self.fits,
            "call": self.call,
        }

    @property
    def _answers(self) -> tuple[str, ...]:
        """Return the answers that are right; empty if another key judges."""
        if isinstance(self.answer, str):
            return (self.answer,)
        return tuple(self.answer or ())

    def _check_choices(self, where: str, choices: tuple[str, ...], named: list[str]) -> None:
        """Raise ``UserError`` unless there are several choices, and the answer is one of them."""
        if len(set(choices)) < 2 or not all(choice.strip() for choice in choices):
            raise errors.UserError(f"{where}: choices: give at least two different texts")
        if named not in ([], ["answer"]):
            raise errors.UserError(
                f"{where}: choices are judged by answer, which is one of them: leave {named[0]} out"
            )
        wrong = [answer for answer in self._answers if answer not in choices]
        if wrong:
            raise errors.UserError(
                f"{where}: the answer {wrong[0]!r} is none of the choices: write it as they do"
            )

    def _judge(self, where: str, *, is_chat: bool) -> judges.Judge | None:
        """Return what judges the answer; None for the dense model's own."""
        if self.answer is not None:
            if not any(map(judges.normalized, self._answers)):
                raise errors.UserError(f"{where}: the answer is empty: leave it out, or write it")
            return judges.ExactMatch(self._answers, first_line=not is_chat)
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise errors.UserError(
                    f"{where}: pattern {self.pattern!r}: {error}: correct the regular expression"
                ) from error
            return judges.PatternMatch(self.pattern)
        if self.call is not None:
            return judges.ToolCall(self.call.name, self.call.arguments)
        return None if self.fits is None else _schema_fit(where, self.fits)


class FollowUp(Asked):
    """Later question of a conversation."""

    prompt: str


class Line(Asked):
    """Line of a file of questions."""

    messages: list[Object] | None = None
    prompt: str | None = None
    tools: list[Object] = Field(default_factory=list)
    then: list[FollowUp] = Field(default_factory=list)

    def conversation(self, where: str) -> Conversation:
        """Return the conversation. Raises ``UserError`` if keys are missing, or contradict each other."""
        if (self.messages is None) == (self.prompt is None):
            raise errors.UserError(
                f"{where}: give messages, for the model's chat template, or a prompt to continue"
            )
        is_chat = self.messages is not None
        if self.messages is not None:
            _check_messages(where, self.messages)
        elif self.tools:
            raise errors.UserError(f"{where}: tools need messages: a prompt has no chat template")
        turns = [self.turn(where, self.prompt or "", is_chat=is_chat)]
        turns += [each.turn(where, each.prompt, is_chat=is_chat) for each in self.then]
        if not all(turn.prompt.strip() for turn in turns[is_chat:]):
            raise errors.UserError(f"{where}: a prompt is empty: give text")
        return Conversation(where, tuple(turns), tuple(self.messages or ()), tuple(self.tools))


def read_questions(file: Path) -> list[Conversation]:
    """Read the conversations of a JSON Lines file.

    Raises ``UserError``, which names the file and the line, and says what to do: a line is no JSON object, has an
    unknown key, or keys that contradict each other; or there is no line.
    """
    conversations = [
        schema.validate(Line, row, where).conversation(where) for where, row in _rows(file)
    ]
    if not conversations:
        raise errors.UserError(f"{file}: no questions: write one JSON object a line")
    return conversations


def _rows(file: Path) -> Iterator[tuple[str, Object]]:
    """Yield the objects of a file, each with the place that errors name."""
    text = files.read_text(file, "questions", max_bytes=_MAX_BYTES)
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = files.parse_json(line)
        except (ValueError, RecursionError) as error:
            raise errors.UserError(
                f"{where}: not valid JSON: {errors.first_line(error)}: write one object a line"
            ) from error
        if not isinstance(row, dict):
            raise errors.UserError(f"{where}: expected a JSON object, with messages or a prompt")
        yield where, row


def _check_messages(where: str, messages: list[Object]) -> None:
    """Raise ``UserError`` unless messages have roles and end with one that a model answers."""
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise errors.UserError(f'{where}: a message has no role: write "role": "user"')
        if message["role"] == "user" and not message.get("content"):
            raise errors.UserError(f"{where}: a message of the user has no content: write it")
    if not messages or messages[-1]["role"] in ("assistant", "system"):
        raise errors.UserError(
            f"{where}: messages must end with one that the model answers: of the user, or a tool"
        )


def _schema_fit(where: str, fits: Object | bool) -> judges.SchemaFit:
    """Return the judge of a JSON Schema. Raises ``UserError`` if it is none."""
    import jsonschema

    judge = judges.SchemaFit(fits)
    try:
        judge.check()
    except jsonschema.exceptions.SchemaError as error:
        place = "/".join(map(str, error.absolute_path)) or "schema"
        raise errors.UserError(
            f"{where}: no JSON Schema: {place}: {errors.first_line(error)}"
        ) from error
    return judge
