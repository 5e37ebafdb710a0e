"""What a command found, for people and, with ``--json``, for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from spkv_nas.cli.console import out, say

if TYPE_CHECKING:
    from spkv_nas.stages.commands import Suggestion


@dataclass(frozen=True)
class Result:
    """What a command found.

    Attributes:
        value: as the stage gives it.
        show: prints it for people.
        document: makes of it what ``--json`` prints by ``plain``; all of it by default.
        exit_code: of the command.
        next: commands to run next, the recommended one first.
    """

    value: Any
    show: Callable[[Any], None]
    document: Callable[[Any], Any] = lambda value: value
    exit_code: int = 0
    next: Sequence[Suggestion] = ()


Results = Result | Iterator[Result]  # of a command; several come as they are found


def present(found: Results, *, as_json: bool) -> int:
    """Print what a command found, each result as it comes or all as one JSON document; the command's exit code."""
    # Several results are the steps of one path, which needs no suggestions in between
    results = iter((found,)) if isinstance(found, Result) else (replace(result, next=()) for result in found)
    documents: list[Any] = []
    code = 0
    for result in results:
        code = max(code, result.exit_code)
        if as_json:
            documents.append(_document(result))
        else:
            result.show(result.value)
            _suggest(result.next)
    if as_json:
        whole = documents[0] if isinstance(found, Result) else documents
        out.write(json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return code


def _document(result: Result) -> Any:
    """The JSON of a result; commands to run next, if there are any, are its key ``next``."""
    document = plain(result.document(result.value))
    commands = [one.command for one in result.next if one.command]
    return {**document, "next": commands} if commands else document


def _suggest(suggestions: Sequence[Suggestion]) -> None:
    """Print each suggestion: its reason, then its command on one line that is never wrapped."""
    for one in suggestions:
        if one.reason:
            say(one.reason)
        if one.command:
            out.print(Text(one.line), soft_wrap=True)


def plain(value: Any) -> Any:
    """A value as JSON has it: numbers unrounded, NaN and infinity as null, tables as lists of rows, paths as text."""
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    elif hasattr(value, "to_dict"):  # a table
        value = value.to_dict("records")
    elif hasattr(value, "tolist"):  # an array, or a number of one
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
