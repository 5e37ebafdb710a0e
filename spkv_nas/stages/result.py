"""Hold what a command returns: a value, and the functions that print it for people and convert it for programs.

The command line prints it (``cli.present``). This module imports nothing heavy, because ``--help`` needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spkv_nas.stages.commands import Suggestion


@dataclass(frozen=True)
class Result:
    """A value that a command returns, and how it is printed.

    Attributes:
        value: the stage's return value.
        show: prints the value for people.
        document: converts the value to what ``--json`` prints (by ``cli.present.plain``); by default the value itself.
        exit_code: the command's exit code.
        next: commands to run next, the recommended one first.
    """

    value: Any
    show: Callable[[Any], None]
    document: Callable[[Any], Any] = lambda value: value
    exit_code: int = 0
    next: Sequence[Suggestion] = ()


Results = Result | Iterator[Result]  # one result, or several that are printed as they arrive
