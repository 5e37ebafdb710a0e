"""Show a command's progress: live rows at the bottom of a terminal, or a log line every 30 seconds elsewhere.

In a terminal a row is visible from the start of the command, before torch is loaded, until its result is printed, so
that no step is silent. A step that knows its progress gets a row of its own with a bar and the time left.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import RenderableType
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

from spkv_nas.base.console import announce, caution, err, out
from spkv_nas.base.progress import LOGGER, Announce, Display, Reporter, clock, count, log_lines

_FRAMES = 5  # per second; drawing one takes half a millisecond


@contextmanager
def working(
    title: str, *, quiet: bool = False, verbose: bool = False, takes_long: bool = True
) -> Iterator[Reporter]:
    """Show progress while the block runs, and with ``takes_long`` announce the start outside a terminal."""
    level = _level(quiet=quiet, verbose=verbose)
    # Show warnings only, rows in a terminal, or lines of a log
    if quiet:
        with _printed(level, announce):
            yield Reporter()
    elif err.is_seen:
        rows = _Rows(title)
        with rows.shown(), _printed(level, rows.announce):
            yield Reporter(rows.bar)
    else:
        if takes_long:
            announce(f"{title}: starting")
        with _printed(level, announce):
            yield Reporter(lambda title: nullcontext(log_lines(title)))


@contextmanager
def messages(*, quiet: bool = False, verbose: bool = False) -> Iterator[None]:
    """Print what is announced while the block runs, before there is progress to show."""
    with _printed(_level(quiet=quiet, verbose=verbose), announce):
        yield


def _level(*, quiet: bool, verbose: bool) -> int:
    """Return the least level of log records that are printed."""
    if quiet:
        return logging.WARNING
    return logging.DEBUG if verbose else logging.INFO


@contextmanager
def _printed(level: int, show: Announce) -> Iterator[None]:
    """Print the package's log records of at least ``level`` in the block: warnings as cautions, others by ``show``."""
    level_before = LOGGER.level
    propagate_before = LOGGER.propagate
    handler = _Printer(show)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)
    # Libraries may have given the root logger a handler, which would print them again
    LOGGER.propagate = False
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level_before)
        LOGGER.propagate = propagate_before


class _Printer(logging.Handler):
    """Print log records on standard error."""

    def __init__(self, show: Announce) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record's message in the style of its level."""
        show = caution if record.levelno >= logging.WARNING else self._show
        show(record.getMessage())


class _Rows:
    """Rows at the bottom of the terminal: one for the command, or one per step that knows its progress."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._shown: Progress | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the rows while the block runs, hidden from each printed result to the next announcement."""
        before = out.before
        out.before = self._hide
        try:
            self._show(f"{self._title}: starting")
            yield
        finally:
            out.before = before
            self._hide()

    def _show(self, title: str) -> Progress:
        """Start the display if it is hidden, and set the command's row to ``title``."""
        if self._shown is None:
            self._shown = Progress(
                SpinnerColumn(),
                _Cell(_title, Column()),  # the only column that is truncated in a narrow terminal
                _Cell(_bar),
                _Cell(_count),
                _Cell(_note),
                _Cell(_time),
                console=err,
                transient=True,
                redirect_stdout=False,
                refresh_per_second=_FRAMES,
            )
            self._shown.add_task(title, total=None, note="")
            self._shown.start()
        self._shown.update(TaskID(0), description=title)
        return self._shown

    def _hide(self) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None

    def announce(self, line: str) -> None:
        """Print a line above the rows."""
        self._show(self._title)
        announce(line)

    @contextmanager
    def bar(self, title: str) -> Iterator[Display]:
        """Show a progress row for one step in place of the command's row while the block runs."""
        rows = self._show(self._title)
        rows.update(TaskID(0), visible=False)
        task = rows.add_task(title, total=None, note="", unit="", end=None)

        def show(
            done: int, total: int, note: str = "", *, unit: str = "", left: float | None = None
        ) -> None:
            end = None if left is None else time.monotonic() + left
            rows.update(task, completed=done, total=total, note=note, unit=unit, end=end)

        try:
            yield show
        finally:
            rows.remove_task(task)
            rows.update(TaskID(0), visible=len(rows.tasks) == 1)


class _Cell(ProgressColumn):
    """A column that shows what a function makes of a task, by default without truncation."""

    def __init__(
        self, show: Callable[[Task], RenderableType], column: Column | None = None
    ) -> None:
        super().__init__(column or Column(no_wrap=True))
        self._show = show

    def render(self, task: Task) -> RenderableType:
        return self._show(task)


def _title(task: Task) -> RenderableType:
    return Text(task.description, no_wrap=True, overflow="ellipsis")


def _bar(task: Task) -> RenderableType:
    """Return the progress bar; empty where the total is unknown, or 0 because nothing was counted yet."""
    if not task.total:
        return ""
    return ProgressBar(total=task.total, completed=task.completed, width=12)


def _count(task: Task) -> RenderableType:
    """Return what is done of the total, such as ``3 of 10 blocks``."""
    if not task.total:
        return ""
    return count(int(task.completed), int(task.total), task.fields["unit"])


def _note(task: Task) -> RenderableType:
    """Return the note, such as the loss."""
    return Text(task.fields["note"], style="dim")


def _time(task: Task) -> RenderableType:
    """Return the time that the command has left if it can be estimated, else the time since the start."""
    end = task.fields.get("end")
    if end is None:
        return Text(clock(task.elapsed or 0.0), style="dim")
    left = max(0.0, end - time.monotonic())
    return Text(f"{clock(left)} left", style="cyan")
