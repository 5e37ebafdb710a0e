"""Compile ``faults.c``, and tell a process which of its file operations fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from paths import ROOT, TESTS

SOURCE = Path(__file__).with_name("faults.c")


def compile_library(folder: Path) -> Path | None:
    """Compile the shared library to ``folder``; return None without gcc."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl"], check=True)
    return library


@dataclass(frozen=True)
class Faults:
    """Faults of file operations below ``root``.

    Attributes:
        kill_at: number of the operation (from 1) before which the process is killed; 0: none.
        full_after: bytes that fit; -1: all.
        log: file to which every operation is written; "": none.
    """

    root: Path
    kill_at: int = 0
    full_after: int = -1
    log: str = ""

    @property
    def request(self) -> list[str | int]:
        """Fields of a request to the fork server."""
        return [str(self.root), self.kill_at, self.full_after, self.log]

    def environment(self, library: Path) -> dict[str, str]:
        """Return the environment variables for a separate process."""
        return {
            "LD_PRELOAD": str(library),
            "FAULTS_ROOT": str(self.root),
            "FAULTS_KILL_AT": str(self.kill_at),
            "FAULTS_FULL_AFTER": str(self.full_after),
            "FAULTS_LOG": self.log,
        }


@dataclass(frozen=True)
class Operation:
    """One line of a log: an operation's number, its kind, and the path below the root."""

    number: int
    what: str
    path: str

    def __str__(self) -> str:
        return f"operation {self.number}, {self.what} {self.path}"


def read_operations(log: Path) -> list[Operation]:
    """Read the log of a run."""
    rows = [line.split(" ", 1) for line in log.read_text().splitlines()] if log.exists() else []
    return [Operation(int(number), *rest.rsplit(" /", 1)) for number, rest in rows if " /" in rest]


def environment() -> dict[str, str]:
    """Return the environment of every process: one thread, no network, no commit that may change during the attack.

    The package is the one beside these tests, whichever is installed.
    """
    paths = [
        *map(str, (ROOT, ROOT / "kernels", TESTS)),
        *(part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part),
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "TQDM_DISABLE": "1",
        "GIT_DIR": os.devnull,
        "COLUMNS": "200",
    }
