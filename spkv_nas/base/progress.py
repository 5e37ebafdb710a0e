"""Progress reporting: callers pass a ``Reporter``, or one of its methods, to long-running work.

Messages are records of the logger ``spkv_nas``, so that Python users choose a level and a handler as usual::

    logging.getLogger("spkv_nas").setLevel(logging.INFO)

The command line prints them (``cli.screen``). Imports nothing heavy, because the command line creates a reporter before
it loads anything else.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

LOGGER = logging.getLogger("spkv_nas")
EVERY = 30.0  # seconds between the lines of ``log_lines``

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


def log_lines(title: str) -> Bar:
    """Return a bar that logs one line every ``EVERY`` seconds, with the time left."""
    last = time.monotonic()
    start: tuple[float, int, int] | None = None  # (time, steps done, total) of the first call with this total

    def tell(done: int, total: int, note: str = "") -> None:
        nonlocal start, last
        now = time.monotonic()
        since, first, _ = start = start if start is not None and start[2] == total else (now, done, total)
        # Estimate the time left from the steps since the first call
        if now - last >= EVERY and done > first:
            last = now
            remaining = clock((now - since) * (total - done) / (done - first))
            LOGGER.info(", ".join(part for part in (f"{title}: {done} of {total}", note, f"{remaining} left") if part))

    return tell


def clock(seconds: float) -> str:
    """Format seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def part_of(bar: Bar, index: int, number: int, title: str = "") -> Bar:
    """Return a bar for part ``index`` of ``number`` equal parts of a bar, whose notes begin with ``title``."""

    def show(done: int, total: int, note: str = "") -> None:
        bar(round(1000 * (index + done / total)), 1000 * number, " ".join(filter(None, (title, note))))

    return show


@dataclass(frozen=True)
class Reporter:
    """Receiver of messages, which it logs, and of progress."""

    # creates, for a title, a context manager that shows a progress bar and yields its ``Bar``
    bar: Callable[[str], AbstractContextManager[Bar]] = lambda _: nullcontext(no_progress)

    @classmethod
    def of(cls, progress: Progress | None) -> "Reporter":
        """Return a reporter whose progress bars call ``progress``."""
        if progress is None:
            return cls()
        return cls(lambda _: nullcontext(lambda done, total, note="": progress(done, total)))

    @property
    def verbose(self) -> bool:
        """Return whether details, and the output of libraries, are wanted."""
        return LOGGER.isEnabledFor(logging.DEBUG)

    def announce(self, line: str) -> None:
        """Log, at level INFO, that a step begins."""
        LOGGER.info(line)

    def caution(self, line: str | None) -> None:
        """Log, at level WARNING, what the user should know before trusting a result; nothing for None."""
        if line is not None:
            LOGGER.warning(line)

    def detail(self, line: str) -> None:
        """Log a detail at level DEBUG."""
        LOGGER.debug(line)

    def reused(self, number: int, total: int, what: str) -> None:
        """Announce how much finished work is reused, if any: "reused 9 of 9 runs"."""
        if number:
            self.announce(f"reused {number} of {total} {what}")


@dataclass(frozen=True)
class Stages:
    """Stages of a command, which share one progress bar."""

    reporter: Reporter
    shares: Mapping[str, float]  # by title, in order: their times relative to each other, about

    @contextmanager
    def begin(self, title: str, step: str = "") -> Iterator[Reporter]:
        """Announce a stage, and yield the reporter for its steps; the bar moves with the one called ``step``."""
        # Place the stage in the bar
        number, times = list(self.shares).index(title), list(self.shares.values())
        start, width = (1000 * part / sum(times) for part in (sum(times[:number]), times[number]))
        heading, position = f"{number + 1} of {len(times)}: {title}", start
        self.reporter.announce(heading)
        with self.reporter.bar(heading) as whole:
            whole(round(start), 1000)

            @contextmanager
            def bar(name: str) -> Iterator[Bar]:
                def show(done: int, total: int, note: str = "") -> None:
                    nonlocal position
                    if name == step:
                        position = start + width * done / total
                    whole(round(position), 1000, " ".join(filter(None, (name, note))))

                yield show

            yield Reporter(bar)


SILENT = Reporter()  # shows no progress
