"""Progress reporting: callers pass a ``Reporter``, or one of its methods, to long-running work.

Messages are records of the logger ``spkv_nas``, so that Python users choose a level and a handler as usual::

    logging.getLogger("spkv_nas").setLevel(logging.INFO)

The command line prints them (``cli.screen``). Imports nothing heavy, because the command line creates a reporter before
it loads anything else.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

LOGGER = logging.getLogger("spkv_nas")
EVERY = 30.0  # seconds between the lines of ``log_lines``

Announce = Callable[[str], None]  # called with one line when a step begins
Progress = Callable[[int, int], None]  # called with (done, total)


# What the work of a step is counted in. How long a unit takes is measured while steps are done
FORWARD = "forward passes"  # of a token through the model
GRADIENT = "passes with gradients"  # counted in forward passes by what a signal is known to cost
START = "starts"  # of the command, in which it imported its libraries: for steps that run no model
SECONDS = "seconds"
_TRUST = 0.1  # part of a step after which its own speed counts as much as the expected one
_RISE = 1.5  # multiple of the lowest time left so far
_NEWS = 3.0  # multiple of it that is shown at once: something changed
# Part of the expected time after which a step that counts nothing is said to be nearly done
_MOST = 0.9


class Bar(Protocol):
    """Progress bar: a ``Progress`` that also accepts a note, such as the loss.

    ``total`` may change between calls, as soon as the work that is left is known better.
    """

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` units are finished."""


class Display(Protocol):
    """Show a bar, with the unit of its count and the seconds that the command has left, if known."""

    def __call__(
        self, done: int, total: int, note: str = "", *, unit: str = "", left: float | None = None
    ) -> None:
        """Show that ``done`` of ``total`` units are finished."""


def silent(_: str) -> None:
    """Discard a message."""


def no_progress(
    done: int, total: int, note: str = "", *, unit: str = "", left: float | None = None
) -> None:
    """Discard a progress update."""


def count(done: int, total: int, unit: str) -> str:
    """Format a count with its unit, as in "3 of 10 blocks"; without a unit it is a percentage."""
    return f"{done:,} of {total:,} {unit}" if unit else f"{100 * done / max(1, total):.0f} %"


@dataclass
class _Step:
    """Step of a command, with its work in a unit."""

    work: float  # expected
    unit: str
    is_expected: bool = True
    begun: float | None = None  # when; None: not yet
    ended: bool = False
    done: float = 0.0
    before: float = 0.0  # of ``done``, when it began: work of an earlier run
    scale: float | None = None  # work of one of what is counted; None: nothing was counted yet

    def own(self, now: float) -> tuple[float, float]:
        """Return the seconds since it began, and the work that was done in them."""
        assert self.begun is not None
        return now - self.begun, self.done - self.before


class Agenda:
    """Steps of a command, done and to be done, and the time that is left for all of them.

    Every step has an expected amount of work in a unit, and steps of a unit share its speed. A step under way corrects
    that speed: its own counts as much as the earlier one after a tenth of the step (``_TRUST``), so that a step twice
    as slow as expected raises the time left by 36 % at most. The work of a step that counts follows its total.

    The course of a search, such as a bisection, is not known before, so that the estimate may rise. A rise above a half
    of the lowest estimate (``_RISE``) is not shown at once, unless it is so large (``_NEWS``) that something changed.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start the clock ``now``, which returns seconds."""
        self._now = now
        self._created = now()
        self._steps: dict[str, _Step] = {}
        self._paces: dict[str, float] = {SECONDS: 1.0}  # seconds that a unit takes
        self._lowest: float | None = None  # time left that was returned

    def expect(self, name: str, work: float, unit: str = FORWARD) -> None:
        """Add a step with its expected work, or correct that of one that has not begun."""
        step = self._steps.get(name)
        if step is None or step.begun is None or step.ended:
            self._steps[name] = _Step(work, unit)

    def drop(self, prefix: str) -> None:
        """Leave out the expected steps whose names begin with ``prefix`` and that were not needed."""
        for name, step in list(self._steps.items()):
            if step.begun is None and name.startswith(prefix):
                del self._steps[name]

    def begin(self, name: str) -> None:
        """Begin a step; the speed of one that was not expected tells nothing about others."""
        now = self._now()
        self._paces.setdefault(START, now - self._created)
        if name not in self._steps or self._steps[name].ended:
            self._steps[name] = _Step(0.0, name, is_expected=False)
        self._steps[name].begun = now

    def advance(self, name: str, done: float, total: float) -> None:
        """Say how much is done of a step's total, which may be another one than before."""
        step = self._steps[name]
        is_first = step.scale is None
        if step.scale is None:
            step.scale = step.work / total if step.is_expected and total > 0 else 1.0
        restarts = step.scale * done < step.done
        step.work = step.scale * total
        step.done = step.scale * done
        # What an unexpected step counts first is of an earlier run, and a smaller count begins another part of it
        if restarts or (is_first and not step.is_expected):
            step.before = step.done
            step.begun = self._now()

    def end(self, name: str) -> None:
        """End a step, whose speed is then expected of later steps of its unit."""
        step = self._steps[name]
        step.ended = True
        if step.unit not in (START, SECONDS):
            seconds, work = step.own(self._now())
            if work > 0.0:
                self._paces[step.unit] = seconds / work

    @property
    def has_expected(self) -> bool:
        """Return whether the work of any step was expected."""
        return any(step.is_expected for step in self._steps.values())

    def left(self) -> float | None:
        """Return the seconds that all steps have left; None as long as a speed is unknown."""
        left = self._estimate()
        if left is None:
            return None
        if self._lowest is None or left > _NEWS * self._lowest:
            self._lowest = left
        self._lowest = min(self._lowest, left)
        return min(left, _RISE * self._lowest)

    def _estimate(self) -> float | None:
        """Return the sum of what the steps have left, each by the speed of its unit; None if one is unknown."""
        now = self._now()
        steps = [step for step in self._steps.values() if not step.ended]
        paces = self._corrected_paces(steps, now)
        total = 0.0
        for step in steps:
            if step.work <= step.done:
                continue
            pace = self._pace(step.unit, paces)
            if pace is None:
                return None
            done = step.done
            if step.begun is not None and step.scale is None and pace > 0.0:
                done = min(_MOST * step.work, (now - step.begun) / pace)
            total += pace * max(0.0, step.work - done)
        return total

    def _corrected_paces(self, steps: Sequence[_Step], now: float) -> dict[str, float]:
        """Return the seconds of each unit, corrected by the steps under way."""
        paces = dict(self._paces)
        for step in steps:
            if step.begun is None or step.done <= step.before:
                continue
            seconds, work = step.own(now)
            earlier = self._pace(step.unit, paces)
            if earlier is None:
                paces[step.unit] = seconds / work
            else:
                trust = _TRUST * step.work
                paces[step.unit] = (seconds + trust * earlier) / (work + trust)
        return paces

    @staticmethod
    def _pace(unit: str, paces: Mapping[str, float]) -> float | None:
        """Return the seconds of a unit; with and without gradients a pass is taken to be the same until measured."""
        other = {FORWARD: GRADIENT, GRADIENT: FORWARD}.get(unit, unit)
        return paces.get(unit, paces.get(other))


def log_lines(title: str) -> Display:
    """Return a display that logs one line every ``EVERY`` seconds, with the time left."""
    last = time.monotonic()

    def tell(
        done: int, total: int, note: str = "", *, unit: str = "", left: float | None = None
    ) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < EVERY:
            return
        last = now
        parts = [f"{title}: {count(done, total, unit)}"]
        if note:
            parts.append(note)
        if left is not None:
            parts.append(f"{clock(left)} left")
        LOGGER.info(", ".join(parts))

    return tell


def logged(title: str) -> Bar:
    """Return a bar for one step, such as a call from Python, that logs lines with the time left."""
    show = log_lines(title)
    agenda = Agenda()
    agenda.begin(title)

    def tell(done: int, total: int, note: str = "") -> None:
        agenda.advance(title, done, total)
        show(done, total, note, unit="steps", left=agenda.left())

    return tell


def clock(seconds: float) -> str:
    """Format seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def part_of(bar: Bar, index: int, number: int, title: str = "") -> Display:
    """Return a display for part ``index`` of ``number`` equal parts of a bar, whose notes begin with ``title``."""

    def show(
        done: int, total: int, note: str = "", *, unit: str = "", left: float | None = None
    ) -> None:
        bar(
            round(1000 * (index + done / total)),
            1000 * number,
            " ".join(filter(None, (title, note))),
        )

    return show


def in_sequence(progress: Progress | None, sizes: Sequence[float]) -> list[Progress]:
    """Return a ``Progress`` for each of several parts of these sizes that make up one count; None discards it."""

    def part(index: int) -> Progress:
        before = sum(sizes[:index])

        def show(done: int, total: int) -> None:
            if progress is not None:
                progress(round(before + sizes[index] * done / total), round(sum(sizes)))

        return show

    return [part(index) for index in range(len(sizes))]


@dataclass(frozen=True)
class Reporter:
    """Receiver of messages, which it logs, and of progress."""

    # creates, for a title, a context manager that shows a progress bar and yields its ``Display``
    display: Callable[[str], AbstractContextManager[Display]] = lambda _: nullcontext(no_progress)
    agenda: Agenda = field(default_factory=Agenda, compare=False)

    @classmethod
    def of(cls, progress: Progress | None) -> "Reporter":
        """Return a reporter whose progress bars call ``progress``."""
        if progress is None:
            return cls()
        return cls(
            lambda _: nullcontext(
                lambda done, total, note="", unit="", left=None: progress(done, total)
            )
        )

    @contextmanager
    def bar(self, title: str, unit: str = "") -> Iterator[Bar]:
        """Show a step of the agenda as a bar, whose count is in ``unit``, in the plural, or else in percent."""
        with self.display(title) as show, self._step(title, show, "", unit) as bar:
            yield bar

    def expect(self, title: str, work: float, unit: str = FORWARD) -> None:
        """Say how much work the step that shows a bar with this title is going to be."""
        self.agenda.expect(title, work, unit)

    @contextmanager
    def _step(self, name: str, show: Display, prefix: str, unit: str) -> Iterator[Bar]:
        """Make a step of the agenda, and yield a bar that shows it, with notes that begin with ``prefix``."""
        self.agenda.begin(name)

        def tell(done: int, total: int, note: str = "") -> None:
            self.agenda.advance(name, done, total)
            notes = " ".join(filter(None, (prefix, note)))
            show(done, total, notes, unit=unit, left=self._left())

        try:
            yield tell
        finally:
            self.agenda.end(name)

    def _left(self) -> float | None:
        """Return the seconds that the command has left; None if not known."""
        return self.agenda.left()

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
class _Stage(Reporter):
    """Reporter of a stage, whose steps share the stage's bar and are called by the stage's heading in the agenda."""

    heading: str = ""
    show: Display = no_progress

    @contextmanager
    def bar(self, title: str, unit: str = "") -> Iterator[Bar]:
        """Show a step by the stage's bar, which names it at once: the count of the step before does not stay."""
        with self._step(f"{self.heading}, {title}", self.show, title, unit) as bar:
            self.show(0, 0, title, left=self._left())
            yield bar

    def _left(self) -> float | None:
        """Return the time left; None as long as no work is expected, such as before the text has been read."""
        return self.agenda.left() if self.agenda.has_expected else None

    def expect(self, title: str, work: float, unit: str = FORWARD) -> None:
        """Say how much work a step of the stage is going to be."""
        self.agenda.expect(f"{self.heading}, {title}", work, unit)


@dataclass(frozen=True)
class Stages:
    """Stages of a command, which share its agenda."""

    reporter: Reporter
    titles: Sequence[str]  # in order

    def expect(self, title: str, step: str, work: float, unit: str = FORWARD) -> None:
        """Say how much work the step of a later stage, which shows a bar called ``step``, is going to be.

        An empty ``step`` is the stage itself, where no step of it is expected.
        """
        heading = self._heading(title)
        self.reporter.agenda.expect(f"{heading}, {step}" if step else heading, work, unit)

    @contextmanager
    def begin(self, title: str) -> Iterator[Reporter]:
        """Announce a stage, and yield the reporter for its steps."""
        heading = self._heading(title)
        agenda = self.reporter.agenda
        self.reporter.announce(heading)
        with self.reporter.display(heading) as show:
            agenda.begin(heading)
            yield _Stage(self.reporter.display, agenda, heading, show)
            agenda.end(heading)
        agenda.drop(heading)

    def _heading(self, title: str) -> str:
        """Return the number and the title of a stage."""
        return f"{self.titles.index(title) + 1} of {len(self.titles)}: {title}"


SILENT = Reporter()  # shows no progress
