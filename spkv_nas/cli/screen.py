"""What is being done, while it is done: rows at the foot of a terminal, or in a pipe a line now and then.

There is a row from the moment a command starts, before torch is loaded, until its result is printed, so no step of it
is silent, whatever it is; a step that knows how far it is has a row of its own, with a bar and the time left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import RenderableType
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

from spkv_nas.base.progress import Bar, Reporter
from spkv_nas.cli.console import announce, caution, err, out

EVERY = 30.0  # seconds between two lines of a step in a pipe
_FRAMES = 5  # a second, of half a millisecond each


@contextmanager
def working(title: str, *, quiet: bool = False, verbose: bool = False, takes_long: bool = True) -> Iterator[Reporter]:
    """Show what the block does, as it tells the reporter that this yields; the rows are gone once it prints a result.

    Args:
        title: of the command.
        quiet: show nothing but what the reader should know before trusting a result.
        takes_long: whether to say in a pipe too that the command has begun, before it has something to tell.
    """
    if quiet:
        yield Reporter(caution=caution)
    elif err.is_seen:
        rows = _Rows(title)
        with rows.shown():
            yield Reporter(rows.announce, caution, rows.bar, verbose)
    else:
        if takes_long:
            announce(f"{title}: starting")
        yield Reporter(announce, caution, _lines, verbose)


class _Rows:
    """The rows at the foot of the terminal: of the command, or of the steps that know how far they are."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._shown: Progress | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the rows while the block runs, but for the time from a printed result to the next announcement."""
        before, out.before = out.before, self._hide
        try:
            self._show(f"{self._title}: starting")
            yield
        finally:
            out.before = before
            self._hide()

    def _show(self, title: str) -> Progress:
        if self._shown is None:
            self._shown = Progress(
                SpinnerColumn(), _Title(), _Bar(), _Count(), _Note(), _Time(),
                console=err, transient=True, redirect_stdout=False, refresh_per_second=_FRAMES,
            )  # fmt: skip
            self._shown.add_task(title, total=None, note="")
            self._shown.start()
        self._shown.update(TaskID(0), description=title)
        return self._shown

    def _hide(self) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None

    def announce(self, line: str) -> None:
        """Say what starts, above the rows."""
        self._show(self._title)
        announce(line)

    @contextmanager
    def bar(self, title: str) -> Iterator[Bar]:
        """A row of its own while the block runs, in place of the command's."""
        rows = self._show(self._title)
        rows.update(TaskID(0), visible=False)
        task = rows.add_task(title, total=None, note="")
        try:
            yield lambda done, total, note="": rows.update(task, completed=done, total=total, note=note)
        finally:
            rows.remove_task(task)
            rows.update(TaskID(0), visible=len(rows.tasks) == 1)


class _Title(ProgressColumn):
    """What is done; the one column that is cut where the terminal is narrow."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class _Whole(ProgressColumn):
    """A column that is not cut."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))


class _Bar(_Whole):
    """A bar; nothing where nobody knows how far it is."""

    def render(self, task: Task) -> RenderableType:
        return "" if task.total is None else ProgressBar(total=task.total, completed=task.completed, width=12)


class _Count(_Whole):
    """How much of how much."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{int(task.completed)}/{int(task.total)}")


class _Note(_Whole):
    """Such as the loss."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], style="dim")


class _Time(_Whole):
    """The time left if that is known, else the time since the start."""

    def render(self, task: Task) -> Text:
        if task.total is None or task.time_remaining is None:
            return Text(_clock(task.elapsed or 0.0), style="dim")
        return Text(f"{_clock(task.time_remaining)} left", style="cyan")


@contextmanager
def _lines(title: str) -> Iterator[Bar]:
    """A step in a pipe: a line every ``EVERY`` seconds."""
    last = time.monotonic()
    begin: tuple[float, int] | None = None

    def tell(done: int, total: int, note: str = "") -> None:
        nonlocal begin, last
        now = time.monotonic()
        since, first = begin = begin or (now, done)
        if now - last >= EVERY and done > first:
            last = now
            left = _clock((now - since) * (total - done) / (done - first))
            announce(", ".join(part for part in (f"{title}: {done} of {total}", note, f"{left} left") if part))

    yield tell


def _clock(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
