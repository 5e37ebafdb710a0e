"""Print what a command returns: text for people or, with ``--json``, one JSON document for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from spkv_nas.base.console import out, say
from spkv_nas.stages.result import Result, Results

if TYPE_CHECKING:
    from spkv_nas.stages.commands import Suggestion


def print_results(output: Results, *, as_json: bool) -> int:
    """Print a command's results as they arrive, or all as one JSON document; return the highest exit code."""
    # Several results are the steps of one workflow: drop the suggestions in between
    results = iter((output,)) if isinstance(output, Result) else (replace(result, next=()) for result in output)
    documents: list[Any] = []
    code = 0
    # Print each result as it arrives, or collect them for the document
    for result in results:
        code = max(code, result.exit_code)
        if as_json:
            documents.append(_document(result))
        else:
            result.show(result.value)
            _suggest(result.next)
    if as_json:
        printed = documents[0] if isinstance(output, Result) else documents
        out.write(json.dumps(printed, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return code


def _document(result: Result) -> Any:
    """Return a result's JSON document; commands to run next, if any, are under the key ``next``."""
    document = plain(result.document(result.value))
    commands = [suggestion.command for suggestion in result.next if suggestion.command]
    return {**document, "next": commands} if commands else document


def _suggest(suggestions: "Sequence[Suggestion]") -> None:
    """Print each suggestion: its reason, then its command on one unwrapped line."""
    for suggestion in suggestions:
        if suggestion.reason:
            say(suggestion.reason)
        if suggestion.command:
            out.print(Text(suggestion.line), soft_wrap=True)


def plain(value: Any) -> Any:
    """Return a value in types that JSON has.

    Numbers stay unrounded, NaN and infinity become null, tables become lists of rows, and paths become text.
    """
    # Convert objects
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif hasattr(value, "to_dict"):  # a pandas table
        value = value.to_dict("records")
    elif hasattr(value, "tolist"):  # an array or a NumPy scalar
        value = value.tolist()
    # Convert containers, and values that JSON lacks
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
