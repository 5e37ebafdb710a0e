"""Send SIGINT, SIGTERM and SIGHUP at any moment: one line, the signal's exit code, and the same result after resuming.

SIGHUP is what a terminal sends when it closes. A training also leaves a checkpoint of the step.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from attack.arena import Arena, Expected, Run
from attack.commands import COMMANDS
from attack.recover import resume
from attack.tally import Round, Tally

SIGNALS = 20
_SAVED = r"/dense-[0-9a-f]+/checkpoint-\d+/"  # the two that stay, of which the signal's may be one and say that it is
_LIBRARY = "[transformers]"  # begins what the library says for itself


@pytest.mark.parametrize("name", ["train", "train-hybrid", "probe-frozen", "auto"])
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name
)
def test_signals(
    name: str,
    number: signal.Signals,
    arena: Arena,
    attack: Callable[[str], AbstractContextManager[Tally]],
) -> None:
    command = COMMANDS[name]
    with attack(f"signals {number.name} {name}") as tally:
        expected = arena.expected(command)
        for round_ in arena.rounds(tally, SIGNALS):
            round_.note("rounds")
            arena.reset(command.start)
            seconds, events = round_.random.uniform(0.02, expected.run.seconds), 0
            # In the midst of training, which is a small part of the time
            if command.trains and round_.number % 2 == 0:
                seconds = round_.random.uniform(0.0, 0.01)
                events = 1 + round_.spread(len(expected.run.steps), 2)
            story = f"{number.name} {seconds:.3f} s after {f'event {events} of training' if events else 'the start'}"
            run = arena.hit(command, number, seconds, events=events)
            look(round_, run, number, expected, story)
            resume(round_, command, expected, story, _SAVED)


def test_signal_to_a_separate_process(
    arena: Arena, attack: Callable[[str], AbstractContextManager[Tally]]
) -> None:
    """Send SIGTERM while ``python -m spkv_nas`` imports, or trains."""
    command = COMMANDS["train"]
    with attack("signals SIGTERM python -m spkv_nas train") as tally:
        expected = arena.expected(command)
        for round_ in arena.rounds(tally, SIGNALS):
            round_.note("rounds")
            arena.reset(command.start)
            seconds = round_.random.uniform(2.0, 8.0)
            run = arena.hit(command, signal.SIGTERM, seconds, forked=False)
            look(round_, run, signal.SIGTERM, expected, f"SIGTERM after {seconds:.3f} s")
            resume(round_, command, expected, f"SIGTERM after {seconds:.3f} s", _SAVED)


def look(round_: Round, run: Run, number: signal.Signals, expected: Expected, story: str) -> None:
    """Check how the command ended: its exit code, its messages, its files."""
    if run.status == 0 or (run.status == -number and run.out == expected.run.out):
        # In the second case, too, all was done: the interpreter was about to end
        round_.note("too late")
        return
    usual = expected.run.err.splitlines()
    messages = [
        line
        for line in run.err.splitlines()
        if line.strip() and line not in usual and _LIBRARY not in line
    ]
    if run.status != 128 + number:
        round_.fail(f"exit not {128 + number}", story, run)
    elif run.has_traceback:
        round_.fail("traceback", story, run)
    elif len(messages) != 1:
        round_.fail(f"{len(messages)} lines said", story, run)
    else:
        round_.note(f"exit {128 + number}")
    if not run.steps or (run.steps[-1][0] == "end" and run.steps[-1][1] == run.steps[-1][2]):
        return  # before, after or between trainings
    round_.note("in training")
    stepped = [(int(step), folder) for what, step, _, folder in run.steps if what == "stepped"]
    if not stepped or stepped[-1][1] != run.steps[-1][3]:
        return  # before its first step
    if has_checkpoint(round_.arena.ground, *stepped[-1]):
        round_.note("checkpoint there")
    else:
        round_.fail(
            "no checkpoint of the step",
            f"{story}, in step {stepped[-1][0]} of {stepped[-1][1]}",
            run,
        )


def has_checkpoint(ground: Path, step: int, folder: str) -> bool:
    """Return whether the run in ``folder`` saved that step."""
    return (ground / folder / f"checkpoint-{step}" / "trainer_state.json").is_file()
