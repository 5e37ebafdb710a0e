"""Run the same command twice at once: both end well, and the result is that of one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from attack.arena import Arena
from attack.commands import COMMANDS
from attack.tally import Tally

RACES = 12


@pytest.mark.parametrize(
    "name", [name for name, command in COMMANDS.items() if command.trains or name == "auto"]
)
def test_races(
    name: str, arena: Arena, attack: Callable[[str], AbstractContextManager[Tally]]
) -> None:
    command = COMMANDS[name]
    with attack(f"races {name}") as tally:
        expected = arena.expected(command)
        for round_ in arena.rounds(tally, RACES):
            round_.note("rounds")
            arena.reset(command.start)
            lead = (
                0.0
                if round_.random.random() < 0.5
                else round_.random.uniform(0.0, expected.run.seconds)
            )
            forked = name != "train" or round_.number > 0
            first = arena.start(command, forked=forked)
            time.sleep(lead)
            second = arena.start(command, forked=forked)
            story = f"the second started {lead:.3f} s after the first"
            for what, run in (("the first", arena.wait(first)), ("the second", arena.wait(second))):
                if run.status or run.status is None or run.has_traceback:
                    round_.fail(
                        "traceback" if run.has_traceback else "failed", f"{story}; {what}", run
                    )
                else:
                    round_.note("ended well")
            if wrong := arena.differences(expected):
                round_.fail("differed", story, None, wrong)
            else:
                round_.note("same")


def test_races_of_two_margins(
    arena: Arena, attack: Callable[[str], AbstractContextManager[Tally]]
) -> None:
    """Run ``auto`` twice at once with other margins and folders: the result is that of one run after the other."""
    first = COMMANDS["auto"]
    words = [{"out": "w/other", "nll=40%": "nll=90%"}.get(word, word) for word in first.words]
    second = replace(first, name="auto-wider", words=tuple(words))
    with attack("races auto with two margins") as tally:
        # Either may be first
        orders = [
            arena.expected(late, arena.expected(early).state)
            for early, late in ((first, second), (second, first))
        ]
        for round_ in arena.rounds(tally, RACES):
            round_.note("rounds")
            arena.reset(first.start)
            lead = round_.random.uniform(0.0, orders[0].run.seconds)
            runs = [arena.start(first)]
            time.sleep(lead)
            runs.append(arena.start(second))
            story = f"the second started {lead:.3f} s after the first"
            for run in map(arena.wait, runs):
                if run.status or run.status is None or run.has_traceback:
                    round_.fail("traceback" if run.has_traceback else "failed", story, run)
                else:
                    round_.note("ended well")
                if "waiting for process" in run.err:
                    round_.note("waited")
            wrong = min((arena.differences(expected) for expected in orders), key=len)
            if wrong:
                round_.fail("differed", story, None, wrong)
            else:
                round_.note("same")
