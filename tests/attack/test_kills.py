"""Send SIGKILL at any moment and before any file operation: the command resumes, and readers see the old or the new."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from attack.arena import Arena, Expected, Run
from attack.commands import COMMANDS, Command
from attack.compare import Snapshot, differences, snapshot
from attack.faults import Operation
from attack.recover import is_clear_error, resume
from attack.tally import Round, Tally

Attack = Callable[[str], AbstractContextManager[Tally]]
KILLS, KILLS_OF_TRAIN = 40, 200
SECOND = 0.2  # share of rounds in which the resumed command is killed too
WRITTEN = {"propose": "w/layouts", "report": "w/reports"}  # by readers


@pytest.mark.parametrize("name", COMMANDS)
def test_kills(name: str, arena: Arena, attack: Attack) -> None:
    command = COMMANDS[name]
    with attack(f"kills {name}") as tally:
        expected = arena.expected(command)
        readers = Readers(arena, command, expected)
        for round_ in arena.rounds(tally, KILLS_OF_TRAIN if name == "train" else KILLS):
            round_.note("rounds")
            arena.reset(command.start)
            story = kill(round_, command, expected, forked=name != "train" or round_.number > 0)
            readers.look(round_, story)
            if round_.random.random() < SECOND:
                story = f"{story}; then {kill(round_, command, expected, anywhere=True)}"
            resume(round_, command, expected, story)


def kill(
    round_: Round,
    command: Command,
    expected: Expected,
    *,
    forked: bool = True,
    anywhere: bool = False,
) -> str:
    """Kill the command once; return a description.

    Rounds with an even number kill before a file operation, spread evenly over all of them, for a training over those
    of its checkpoints and final folder; the others at a random moment. ``anywhere``: before any operation.
    """
    arena, random = round_.arena, round_.random
    if round_.number % 2 and not anywhere:
        seconds = random.uniform(0.0, expected.run.seconds)
        run = arena.hit(command, signal.SIGKILL, seconds, forked=forked)
        story = f"killed after {seconds:.3f} of {expected.run.seconds:.3f} s"
    else:
        points = [
            operation
            for operation in expected.operations
            if anywhere or _counts(command, operation)
        ]
        point = points[
            int(random.random() * len(points)) if anywhere else round_.spread(len(points), 2)
        ]
        run = arena.run(command, kill_at=point.number, forked=forked)
        story = f"killed before {point}"
    if run.status == -signal.SIGKILL:
        round_.note("killed")
    elif run.status == 0 or (
        command.once and is_clear_error(run) and not arena.differences(expected)
    ):
        round_.note("too late")  # in the second case a kill before this one was
    else:
        round_.fail("traceback" if run.has_traceback else "failed before the kill", story, run)
    return story


def _counts(command: Command, operation: Operation) -> bool:
    return not command.trains or "final" in operation.path or "checkpoint-" in operation.path


class Readers:
    """Runs the command that reads the result: after a kill it must see all of the old result or all of the new."""

    def __init__(self, arena: Arena, command: Command, expected: Expected) -> None:
        self._arena, self._command, self._expected = arena, command, expected
        self._reader = COMMANDS.get(command.reader)
        self._allowed: list[tuple[int | None, Snapshot]] = []

    def look(self, round_: Round, story: str) -> None:
        """Run the reader on the ground, and leave the ground unchanged."""
        if self._reader is None:
            return
        arena = self._arena
        kept = arena.folder / "killed"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(arena.ground, kept)
        if not self._allowed:
            self._allowed = [
                self._outcome(state)[:2]
                for state in (arena.state(self._command.start), self._expected.state)
            ]
        status, seen, run = self._outcome(kept)
        round_.note("read")
        story = f"{story}; {self._reader.name} run on what was left"
        if status is None or run.has_traceback or (status and not is_clear_error(run)):
            round_.fail("reader failed", story, run)
        elif not self._command.grows and (status, seen) not in self._allowed:
            _, (status_after, new) = self._allowed
            problems = (
                differences(new, seen)
                if status == status_after
                else [f"exit {status}, not {status_after}"]
            )
            round_.fail(
                "mixture",
                f"{story} saw neither the old nor the new result; against the new",
                run,
                problems,
            )
        arena.reset(kept)

    def _outcome(self, state: Path) -> tuple[int | None, Snapshot, Run]:
        assert self._reader is not None
        self._arena.reset(state)
        run = self._arena.run(self._reader)
        return run.status, snapshot(self._arena.ground, WRITTEN[self._reader.name]), run
