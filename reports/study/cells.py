"""Run cells: units of work with one result each, so that an interrupted run resumes with the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rows import Row

from spkv_nas.base.progress import Reporter
from spkv_nas.base.units import format_seconds


@dataclass(frozen=True)
class Cell:
    """One unit of work.

    Attributes:
        kind: cells of one kind are assumed to take equally long.
        title: description in progress messages.
        result: file, or row of a file, that ``make`` writes last, and atomically.
        make: does the work.
    """

    kind: str
    title: str
    result: Path | Row
    make: Callable[[], object]


def work(cells: Sequence[Cell], reporter: Reporter, limit: int | None = None) -> int:
    """Run the unfinished cells and announce the time each took and the time remaining.

    A cell that shares its result with another one runs only once.

    Args:
        cells: all cells, in order.
        reporter: receives progress messages.
        limit: maximum number of cells to run.

    Returns:
        The number of cells left.
    """
    distinct = {cell.result: cell for cell in cells}
    pending = [cell for cell in distinct.values() if not cell.result.exists()]
    reporter.reused(len(distinct) - len(pending), len(distinct), "cells")
    seconds_by_kind: dict[str, list[float]] = {}
    for number, cell in enumerate(pending[:limit], 1):
        reporter.announce(f"[{number}/{len(pending)}] {cell.title}")
        # Run the cell and measure its time
        start, busy = time.perf_counter(), time.process_time()
        cell.make()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        seconds_by_kind.setdefault(cell.kind, []).append(seconds)
        # Estimate the remaining time from cells of the same kind, or of any
        all_seconds = [value for values in seconds_by_kind.values() for value in values]
        remaining_seconds = sum(
            _mean(seconds_by_kind.get(other.kind, all_seconds)) for other in pending[number:]
        )
        duration = f"{format_seconds(seconds)}, {format_seconds(busy)} of a core"
        reporter.announce(
            f"[{number}/{len(pending)}] took {duration}; left: about {format_seconds(remaining_seconds)}"
        )
    return len(pending) - len(pending[:limit])


def _mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)
