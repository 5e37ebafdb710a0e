"""Fill the disk after any number of bytes: a clear error, and with free space again the undisturbed result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from attack.arena import Arena
from attack.commands import COMMANDS
from attack.recover import is_clear_error, resume
from attack.tally import Tally

SIZES = 20


@pytest.mark.parametrize("name", COMMANDS)
def test_full_disk(
    name: str, arena: Arena, attack: Callable[[str], AbstractContextManager[Tally]]
) -> None:
    command = COMMANDS[name]
    with attack(f"disk {name}") as tally:
        expected = arena.expected(command)
        for round_ in arena.rounds(tally, SIZES):
            round_.note("rounds")
            arena.reset(command.start)
            size = round_.spread(expected.run.done["bytes"])
            story = f"disk full after {size} of {expected.run.done['bytes']} bytes"
            run = arena.run(command, full_after=size, forked=name != "train" or round_.number > 0)
            if is_clear_error(run):
                round_.note("clear errors")
            elif run.status == 0 and not run.has_traceback:
                round_.note("went through")
                if wrong := arena.differences(expected):
                    round_.fail("exit 0 without the result", story, run, wrong)
            else:
                round_.fail("traceback" if run.has_traceback else "no clear error", story, run)
            resume(round_, command, expected, story)
