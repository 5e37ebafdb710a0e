"""Count what an attack tried and how it ended, and describe every failure with how to repeat it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attack.arena import Arena, Run

MAX_SHOWN = 5  # failures of one attack that are printed in full
_TAIL = 600  # characters of a command's standard error


@dataclass
class Tally:
    """Counts and failures of one attack on one command."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        counts = ", ".join(
            f"{what} {number}" for what, number in self.counts.items() if number or what == "failed"
        )
        return f"{self.name}: {counts} ({self.seconds:.0f} s)"

    def check(self) -> None:
        """Fail the test if a round failed."""
        shown = self.failures[:MAX_SHOWN]
        left = len(self.failures) - len(shown)
        more = [f"... and {left} more"] if left else []
        assert not self.failures, "\n\n".join(
            [f"{len(self.failures)} failures of {self}", *shown, *more]
        )


@dataclass
class Round:
    """One round of an attack: its random numbers, and the tally of its failures."""

    tally: Tally
    number: int
    count: int
    random: random.Random
    arena: Arena
    _failed: bool = False

    def note(self, *what: str) -> None:
        """Count events by name."""
        self.tally.counts.update(what)

    def spread(self, size: int, parts: int = 1) -> int:
        """Draw an index below ``size``; all rounds, or every ``parts``-th, together cover the range evenly."""
        among, index = max(1, self.count // parts), self.number // parts
        return min(size - 1, int(size * (index + self.random.random()) / among)) if size else 0

    def fail(
        self, what: str, story: str, run: Run | None = None, wrong: list[str] | None = None
    ) -> None:
        """Record a failure, and how to look at it and repeat it."""
        self.note(what)
        if not self._failed:
            self.note("failed")
        self._failed = True
        where = self.arena.keep(f"{self.tally.name}-{self.number}".replace(" ", "-"))
        lines = [f"{self.tally.name}, round {self.number}: {what}: {story}"]
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            lines.append(f"  first: {wrong[0]}{more}")
        lines.append(
            f"  again: --rounds {self.arena.percent:g} --attack-seed {self.arena.seed} --round {self.number}\n"
            f"  ground: {where}"
        )
        if run is not None:
            lines.append(f"  output: {run.folder}, exit {run.status}; end of its standard error:")
            lines += [f"    {line}" for line in run.err[-_TAIL:].strip().splitlines()]
        self.tally.failures.append("\n".join(lines))
