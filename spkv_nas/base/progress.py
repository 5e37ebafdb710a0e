"""How long work says what it does: whoever starts it hands in a ``Reporter``, or one function of it.

Nothing heavy is imported here: the command line makes a reporter before anything else is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

Announce = Callable[[str], None]  # told what begins, one line each
Progress = Callable[[int, int], None]  # told (done, in all)


class Bar(Protocol):
    """A bar on the screen: a ``Progress`` that also takes a note, such as the loss."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


def silent(_: str) -> None:
    """An ``Announce`` that says nothing."""


def no_progress(done: int, total: int, note: str = "") -> None:
    """A ``Bar`` that shows nothing."""


@contextmanager
def _no_bar(_: str) -> Iterator[Bar]:
    yield no_progress


@dataclass(frozen=True)
class Reporter:
    """Whom work tells what it does.

    Attributes:
        announce: told what starts, one line each.
        caution: told what the reader should know before trusting a result.
        bar: makes, for a title, a context in which a progress bar is shown; it yields what tells it (done, total).
        verbose: whether to say details too, and to let libraries speak.
    """

    announce: Announce = silent
    caution: Announce = silent
    bar: Callable[[str], AbstractContextManager[Bar]] = _no_bar
    verbose: bool = False

    def detail(self, line: str) -> None:
        """Announce what only some want to know."""
        if self.verbose:
            self.announce(line)

    def reused(self, number: int, total: int, what: str) -> None:
        """Announce how much was finished before and has not to be done again, if anything: "reused 9 of 9 runs"."""
        if number:
            self.announce(f"reused {number} of {total} {what}")


SILENT = Reporter()
