"""Whom a stage tells what it does. Nothing heavy is imported here: the command line makes one before a stage runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from spkv_nas.base.progress import Announce, Progress, silent


@contextmanager
def _no_bar(_: str) -> Iterator[Progress]:
    yield lambda done, total: None


@dataclass(frozen=True)
class Reporter:
    """Whom a stage tells what it does.

    Attributes:
        announce: told what starts, one line each.
        caution: told what the reader should know before trusting a result.
        bar: makes, for a title, a context in which a progress bar is shown; it yields what tells it (done, total).
    """

    announce: Announce = silent
    caution: Announce = silent
    bar: Callable[[str], AbstractContextManager[Progress]] = _no_bar


SILENT = Reporter()
