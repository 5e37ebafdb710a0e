"""Run a command on a terminal of 80 columns, and record what a user sees and when.

``python tests/terminal.py probe --max-tokens 20000`` runs it and says after how long the first output came, how long
the longest silences were and what came before them, and which lines were too wide.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len

COLUMNS = 80
SILENCE = 3.0  # seconds
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Seen:
    """Output of a terminal: (seconds since the start, text) of every write, the total seconds, and the exit code."""

    outputs: list[tuple[float, str]]
    seconds: float
    exit_code: int

    @property
    def text(self) -> str:
        """Whole output, with control sequences."""
        return "".join(text for _, text in self.outputs)

    @property
    def lines(self) -> list[str]:
        """Every line that was ever on the screen, including overwritten ones."""
        return [line for line in re.split(r"[\r\n]+", _CONTROL.sub("", self.text)) if line.strip()]

    @property
    def wide_lines(self) -> list[str]:
        """Lines wider than the terminal, except long paths, which must not be broken."""
        return [
            line
            for line in self.lines
            if cell_len(line.rstrip()) > COLUMNS
            and not any("/" in word and len(word) > COLUMNS // 3 for word in line.split())
        ]

    def silences(self, longest: float) -> list[tuple[float, float, str]]:
        """Return (when, seconds, line before) of silences longer than ``longest``, including the one at the start."""
        times = [0.0, *(when for when, _ in self.outputs), self.seconds]
        before = ["the start", *(text for _, text in self.outputs)]
        gaps = zip(times, times[1:], before, strict=False)
        return [
            (when, after - when, _CONTROL.sub("", text).strip()[-COLUMNS:])
            for when, after, text in gaps
            if after - when > longest
        ]


def run(
    *arguments: str | Path, environment: dict[str, str] | None = None, folder: Path | None = None
) -> Seen:
    """Run ``spkv-nas`` with both outputs on a new terminal."""
    return run_program(
        [sys.executable, "-m", "spkv_nas", *map(str, arguments)], environment, folder
    )


def run_program(
    command: list[str], environment: dict[str, str] | None = None, folder: Path | None = None
) -> Seen:
    """Run any command on a terminal, as ``run`` does."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env={**plain, "TERM": "xterm", **(environment or {})},
    )
    os.close(slave)
    outputs = []
    with open(master, "rb", buffering=0) as screen:
        while True:
            select.select([screen], [], [])
            try:
                data = screen.read(1 << 16)
            except OSError:  # how Linux says that nobody writes any more
                data = b""
            if not data:
                break
            outputs.append((time.monotonic() - start, data.decode(errors="replace")))
    code = process.wait()
    return Seen(outputs, time.monotonic() - start, code)


def main() -> None:
    seen = run(*sys.argv[1:])
    first = next(
        (when for when, text in seen.outputs if _CONTROL.sub("", text).strip()), float("nan")
    )
    print(
        f"exit code {seen.exit_code} after {seen.seconds:.1f} s, first output after {first:.2f} s"
    )
    for when, seconds, before in seen.silences(SILENCE):
        print(f"silent for {seconds:.1f} s from {when:.1f} s on, after: {before}")
    for line in seen.wide_lines:
        print(f"{cell_len(line)} columns: {line}")


if __name__ == "__main__":
    main()
