"""Graceful shutdown on Ctrl-C, SIGTERM (sent by schedulers) and SIGHUP (sent when a terminal closes).

The command line raises ``Interrupted`` on such a signal. Training defers it to the end of the step, saves a checkpoint
and then exits. Schedulers and torchrun may send a signal twice or to every process of a job, so only a second Ctrl-C,
from a user who no longer waits, is not deferred. Signals that the shell ignores, as with nohup, stay ignored.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
_AT_ONCE = 0.5  # seconds within which a second SIGINT counts as a duplicate of the first


class Interrupted(BaseException):
    """Request by a signal to exit; neither an ``Exception`` nor a ``KeyboardInterrupt``, which libraries catch."""

    def __init__(self, number: int) -> None:
        """Name the signal and derive the exit code."""
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number  # as shells do


@dataclass
class Pending:
    """Signal that arrived while signals were deferred, if any, and when, in monotonic seconds."""

    number: int | None = None
    since: float = field(default=0.0, repr=False)

    def raise_if_any(self) -> None:
        """Raise ``Interrupted`` if a signal arrived."""
        if self.number is not None:
            raise Interrupted(self.number)


def _raise(number: int, frame: FrameType | None) -> None:
    """Handle a signal: ignore later ones, except Ctrl-C, and raise ``Interrupted``."""
    for other_signal in _SIGNALS:
        if other_signal != signal.SIGINT and signal.getsignal(other_signal) is _raise:
            signal.signal(other_signal, signal.SIG_IGN)  # do not interrupt the shutdown
    raise Interrupted(number)


@contextmanager
def raising() -> Iterator[None]:
    """Raise ``Interrupted`` on a signal while the block runs; only in the main thread."""
    handled_signals = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    with _handled_by(_raise, handled_signals):
        yield


@contextmanager
def deferred() -> Iterator[Pending]:
    """Record signals in the yielded object while the block runs; a second Ctrl-C raises ``Interrupted``.

    Nothing changes where ``raising`` is not active, as in a program with its own handlers.
    """
    pending = Pending()

    def record(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if (
            number == signal.SIGINT
            and pending.number is not None
            and now - pending.since > _AT_ONCE
        ):
            raise Interrupted(number)
        if pending.number is None:
            pending.number = number
            pending.since = now

    with _handled_by(record, [number for number in _SIGNALS if signal.getsignal(number) is _raise]):
        yield pending


@contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], None], numbers: Sequence[int]
) -> Iterator[None]:
    """Install ``handler`` for signals while the block runs."""
    previous_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, previous_handler)
