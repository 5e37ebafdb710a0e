"""Read mutants of every kind of file in this process: accepted or refused in a few lines, never a crash."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from attack import mutants
from attack.readers import READERS
from attack.tally import Tally

FULL, MIN_MUTANTS = 1000, 80  # mutants of a kind of file


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_reader(
    reader: mutants.Reader,
    request: pytest.FixtureRequest,
    attack: Callable[[str], AbstractContextManager[Tally]],
) -> None:
    option = request.config.getoption
    number = max(MIN_MUTANTS, round(FULL * option("--rounds", 1.0) / 100))
    with attack(f"mutants {reader.name}") as tally:
        outcome = mutants.attack(reader, number, seed=option("--attack-seed", 0))
        tally.counts.update(
            {
                "rounds": number,
                "accepted": outcome.accepted,
                "refused": outcome.refused,
                "failed": len(outcome.crashes),
            }
        )
        tally.failures += outcome.crashes
