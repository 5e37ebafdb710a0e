"""Cells: pieces of work with a file each, which says that they are done. A killed run goes on with the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spkv_nas.base.progress import Reporter
from spkv_nas.base.units import format_seconds


@dataclass(frozen=True)
class Cell:
    """One piece of work.

    Attributes:
        kind: cells of one kind take about as long.
        title: for people.
        file: is there once the cell is done; ``make`` writes it last, and at once.
        chooser: whose layout it judges; None if it is nobody's.
    """

    kind: str
    title: str
    file: Path
    make: Callable[[], object]
    chooser: str | None = None


def work(cells: Sequence[Cell], reporter: Reporter, limit: int | None = None) -> int:
    """Make what is not there, at most ``limit`` cells; how many are left. Says how long each took, and the time left.

    A cell that an earlier one makes unnecessary, because both have one file, is not made twice.
    """
    left = list({cell.file: cell for cell in cells if not cell.file.exists()}.values())
    reporter.reused(len(cells) - len(left), len(cells), "cells")
    taken: dict[str, list[float]] = {}
    for number, cell in enumerate(left[:limit], 1):
        reporter.announce(f"[{number}/{len(left)}] {cell.title}")
        start, busy = time.perf_counter(), time.process_time()
        cell.make()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        taken.setdefault(cell.kind, []).append(seconds)
        known = [value for values in taken.values() for value in values]
        rest = sum(_mean(taken.get(other.kind, known)) for other in left[number:])
        own = f"{format_seconds(seconds)}, {format_seconds(busy)} of a core"
        reporter.announce(f"[{number}/{len(left)}] took {own}; left: about {format_seconds(rest)}")
    return len(left) - len(left[:limit])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
