"""Progress reporting: callers pass a ``Reporter``, or one of its functions, to long-running work.

Imports nothing heavy, because the command line creates a reporter before it loads anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

Announce = Callable[[str], None]  # called with one line when a step begins
Progress = Callable[[int, int], None]  # called with (done, total)


class Bar(Protocol):
    """Progress bar: a ``Progress`` that also accepts a note, such as the loss."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` steps are finished."""


def silent(_: str) -> None:
    """Discard a message."""


def no_progress(done: int, total: int, note: str = "") -> None:
    """Discard a progress update."""


@contextmanager
def _no_bar(_: str) -> Iterator[Bar]:
    """Yield a bar that shows nothing."""
    yield no_progress


@dataclass(frozen=True)
class Reporter:
    """Receiver of progress and status messages.

    Attributes:
        announce: called with one line when a step begins.
        caution: called with what the user should know before trusting a result.
        bar: creates, for a title, a context manager that shows a progress bar and yields its ``Bar``.
        verbose: whether to show details and the output of libraries.
    """

    announce: Announce = silent
    caution: Announce = silent
    bar: Callable[[str], AbstractContextManager[Bar]] = _no_bar
    verbose: bool = False

    def detail(self, line: str) -> None:
        """Announce a detail, if verbose."""
        if self.verbose:
            self.announce(line)

    def reused(self, number: int, total: int, what: str) -> None:
        """Announce how much finished work is reused, if any: "reused 9 of 9 runs"."""
        if number:
            self.announce(f"reused {number} of {total} {what}")


SILENT = Reporter()
