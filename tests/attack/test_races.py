"""Run the same command twice at once: both end well, and the result is that of one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from attack.arena import Arena
from attack.commands import COMMANDS
from attack.tally import Tally

RACES = 12


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.trains])
def test_races(name: str, arena: Arena, attack: Callable[[str], AbstractContextManager[Tally]]) -> None:
    command = COMMANDS[name]
    with attack(f"races {name}") as tally:
        expected = arena.expected(command)
        for round_ in arena.rounds(tally, RACES):
            round_.note("rounds")
            arena.reset(command.start)
            lead = 0.0 if round_.random.random() < 0.5 else round_.random.uniform(0.0, expected.run.seconds)
            forked = name != "train" or round_.number > 0
            first = arena.start(command, forked=forked)
            time.sleep(lead)
            second = arena.start(command, forked=forked)
            story = f"the second started {lead:.3f} s after the first"
            for what, run in (("the first", arena.wait(first)), ("the second", arena.wait(second))):
                if run.status or run.status is None or run.has_traceback:
                    round_.fail("traceback" if run.has_traceback else "failed", f"{story}; {what}", run)
                else:
                    round_.note("ended well")
            if wrong := arena.differences(expected):
                round_.fail("differed", story, None, wrong)
            else:
                round_.note("same")
