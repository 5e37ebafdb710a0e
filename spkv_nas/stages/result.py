"""Hold what a command returns: a value, and how to print and convert it. Import nothing heavy, for ``--help``."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spkv_nas.stages.commands import Suggestion


@dataclass(frozen=True)
class Result:
    """A value that a command returns, and how it is printed."""

    value: Any  # what the stage returns
    show: Callable[[Any], None]  # prints the value for people
    document: Callable[[Any], Any] = lambda value: value  # converts it to what ``--json`` prints
    exit_code: int = 0
    next: Sequence[Suggestion] = ()  # commands to run next, the recommended one first


Results = Result | Iterator[Result]  # one result, or several that are printed as they arrive
