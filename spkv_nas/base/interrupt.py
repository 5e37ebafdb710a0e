"""Ctrl-C, SIGTERM, which schedulers send, and SIGHUP of a terminal that closes: all end a command in order.

The command line turns such a signal into ``Interrupted`` where it strikes. Training defers it to the end of the step,
saves a checkpoint, and goes then. Schedulers and torchrun send a signal twice or to every process of a job, so only a
second Ctrl-C, by a person who no longer waits, is not deferred. What the shell had ignored, as nohup does, stays so.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

_AT_ONCE = 0.5  # seconds within which a second Ctrl-C is the first, come twice


class Interrupted(BaseException):
    """A signal has asked this process to end. No ``Exception``, and no ``KeyboardInterrupt``, which libraries catch."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number  # as shells report it


@dataclass
class Pending:
    """The signal that came while it was deferred; None before. ``since`` is when."""

    number: int | None = None
    since: float = field(default=0.0, repr=False)

    def raise_if_any(self) -> None:
        """Raise ``Interrupted`` if a signal came."""
        if self.number is not None:
            raise Interrupted(self.number)


def _raise(number: int, frame: FrameType | None) -> None:
    for other in _SIGNALS:
        if other != signal.SIGINT and signal.getsignal(other) is _raise:
            signal.signal(other, signal.SIG_IGN)  # what ends in order is not to be disturbed
    raise Interrupted(number)


@contextmanager
def raising() -> Iterator[None]:
    """While the block runs, such a signal raises ``Interrupted`` in it; in the main thread only."""
    heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    with _handled_by(_raise, heard):
        yield


@contextmanager
def deferred() -> Iterator[Pending]:
    """While the block runs, signals are noted in what this yields; a second Ctrl-C raises ``Interrupted``.

    Where ``raising`` is not in force, as in a program that has handlers of its own, nothing changes.
    """
    pending = Pending()

    def note(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and pending.number is not None and now - pending.since > _AT_ONCE:
            raise Interrupted(number)
        if pending.number is None:
            pending.number, pending.since = number, now

    with _handled_by(note, [number for number in _SIGNALS if signal.getsignal(number) is _raise]):
        yield pending


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None], numbers: Sequence[int]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
