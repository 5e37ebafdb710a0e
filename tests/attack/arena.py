"""Run, interrupt, repeat and compare commands in one folder, called the ground.

The ground is always the same folder, filled anew for every round from the state that the command starts from. What an
undisturbed run makes of that state is computed once, by the same means.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from attack.commands import COMMANDS, Command, write_ground
from attack.compare import Snapshot, differences, snapshot
from attack.faults import Faults, Operation, environment, read_operations
from attack.tally import Round, Tally

LIMIT = 600.0  # seconds that a command may take before it counts as hung, on a machine that others use, too


@dataclass
class Run:
    """A command that was started: its process, and once it has ended, its exit code and duration."""

    number: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    began: float = field(default_factory=time.monotonic)
    status: int | None = None  # exit code; negative: the signal; None: it hung, and was killed
    seconds: float = 0.0

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        file = self.folder / "err"
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.err

    @property
    def operations(self) -> list[Operation]:
        return read_operations(self.folder / "operations")

    @property
    def steps(self) -> list[list[str]]:
        """Rows of the trace: event, step, number of steps, folder."""
        file = self.folder / "trace"
        return [line.split("\t") for line in file.read_text().splitlines()] if file.exists() else []

    @cached_property
    def done(self) -> dict[str, Any]:
        file = self.folder / "done"
        return json.loads(file.read_text()) if file.exists() else {}

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended; its number stays reserved until it is waited for."""
        os.kill(self.number, number)


@dataclass(frozen=True)
class Expected:
    """Files, output and duration of an undisturbed run."""

    files: Snapshot
    run: Run
    state: Path

    @property
    def operations(self) -> list[Operation]:
        return self.run.operations


class Server:
    """Client of the process that runs ``server.py``."""

    def __init__(self, library: Path, log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "attack.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**environment(), "LD_PRELOAD": str(library)},
            text=True,
        )
        self.threads = int(self._answer())

    def ask(self, action: str, **request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"action": action, **request}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the fork server has ended: {Path(self._log.name).read_text()[-2000:]}"
            )
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)
        self._log.close()


class Arena:
    """Holds the ground, the states that commands start from, and the fork server.

    Args:
        folder: an empty one; failed rounds are kept in ``folder/failed``.
        percent: of the full number of rounds.
        seed: of every random choice; a round depends on it, on the attack and on its own number alone.
        only: play this round of every attack and no other; None: all.
    """

    def __init__(
        self, folder: Path, library: Path, *, percent: float, seed: int, only: int | None = None
    ) -> None:
        self.folder = folder
        self.library = library
        self.percent = percent
        self.seed = seed
        self.only = only
        self.ground = folder / "ground"
        self._number = 0
        self._states: dict[str, Path] = {}
        self._expected: dict[str, Expected] = {}
        self.server = Server(library, folder / "server.log")

    # rounds

    def rounds(self, tally: Tally, full: int) -> list[Round]:
        """Return the rounds of one attack, which has ``full`` rounds in all."""
        count = max(1, -(-full * self.percent // 100))
        numbers = range(int(count)) if self.only is None else [self.only]
        return [
            Round(
                tally, number, int(count), random.Random(f"{self.seed}:{tally.name}:{number}"), self
            )
            for number in numbers
        ]

    # states and what is expected

    def state(self, name: str) -> Path:
        """Return a copy of the ground after the command ``name``, or with "empty" before any command."""
        if name not in self._states:
            if name == "empty":
                self._states[name] = self.folder / "states" / "empty"
                write_ground(self._states[name])
            else:
                self._states[name] = self.expected(COMMANDS[name]).state
        return self._states[name]

    def reset(self, state: Path | str) -> None:
        """Fill the ground anew."""
        source = self.state(state) if isinstance(state, str) else state
        shutil.rmtree(self.ground, ignore_errors=True)
        shutil.copytree(source, self.ground)

    def expected(self, command: Command, start: Path | str | None = None) -> Expected:
        """Return the result of an undisturbed run, from the command's usual state or another; changes the ground."""
        key = f"{command.name} {start or command.start}"
        if key not in self._expected:
            self.reset(start or command.start)
            run = self.run(command)
            if run.status != 0:
                raise RuntimeError(f"undisturbed, {command.name} failed ({run.status}):\n{run.err}")
            kept = self.folder / "states" / f"{len(self._expected)}-{command.name}"
            shutil.copytree(self.ground, kept)
            self._expected[key] = Expected(snapshot(self.ground), run, kept)
            self.server.ask("load", modules=run.done["imported"])
        return self._expected[key]

    def differences(self, expected: Expected) -> list[str]:
        """Return the differences between the ground and the expected files."""
        return differences(expected.files, snapshot(self.ground))

    # commands

    def start(
        self,
        command: Command,
        *,
        kill_at: int = 0,
        full_after: int = -1,
        injection: dict[str, Any] | None = None,
        forked: bool = True,
    ) -> Run:
        """Start a command; with ``forked=False`` in a separate process, as a user does."""
        self._number += 1
        folder = self.folder / "runs" / str(self._number)
        folder.mkdir(parents=True)
        files = {name: str(folder / name) for name in ("out", "err", "done")}
        faults = Faults(self.ground, kill_at, full_after, str(folder / "operations"))
        arguments = command.arguments(self.ground)
        if not forked:
            with open(files["out"], "w") as out, open(files["err"], "w") as err:
                process = subprocess.Popen(
                    [sys.executable, "-m", "spkv_nas", *arguments],
                    cwd=self.ground,
                    stdout=out,
                    stderr=err,
                    stdin=subprocess.DEVNULL,
                    env={**environment(), **faults.environment(self.library)},
                )
            return Run(process.pid, folder, process)
        trace = str(folder / "trace") if command.trains else ""
        job = {
            "folder": str(self.ground),
            "arguments": arguments,
            "faults": faults.request,
            "environment": {},
            "injection": injection,
            "trace": trace,
            **files,
        }
        return Run(self.server.ask("start", job=job), folder)

    def wait(self, run: Run, seconds: float = LIMIT) -> Run:
        """Wait until a command ends, or kill it after ``seconds``."""
        hung = False
        if not self._ended(run, seconds):
            hung = True
            run.send(signal.SIGKILL)
            assert self._ended(run, LIMIT)
        run.seconds = time.monotonic() - run.began
        if hung:
            run.status = None
        return run

    def _ended(self, run: Run, seconds: float) -> bool:
        if run.process is None:
            run.status = self.server.ask("wait", number=run.number, seconds=seconds)
            return run.status is not None
        try:
            run.status = run.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def run(self, command: Command, **faults: Any) -> Run:
        """Start a command and wait for its end."""
        return self.wait(self.start(command, **faults))

    def hit(
        self, command: Command, number: int, seconds: float, *, events: int = 0, forked: bool = True
    ) -> Run:
        """Start a command, send it a signal after so many seconds, and wait for its end.

        The seconds begin when it is on its way, no more a copy of the server; with ``events``, when its trace has so
        many lines.
        """
        run = self.start(command, forked=forked)
        limit = time.monotonic() + LIMIT
        while forked and time.monotonic() < limit:
            if (run.folder / "done").exists() or (
                (run.folder / "err").exists() and len(run.steps) >= events
            ):
                break
            time.sleep(0.001)
        time.sleep(seconds)
        run.send(number)
        return self.wait(run)

    def keep(self, name: str) -> Path:
        """Keep the ground of a failed round; return the copy's folder."""
        target = self.folder / "failed" / name
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            shutil.copytree(self.ground, target)
        return target

    def close(self) -> None:
        self.server.close()
