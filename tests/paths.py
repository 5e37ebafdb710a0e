"""Folders of the checkout that tests read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
EXAMPLE = "stdlib-21x3"


def tracked(*patterns: str) -> list[Path]:
    """Return the checkout's files that match patterns of git, without those that commands have written into it.

    Outside a clone, such as in an unpacked source distribution, nothing tells them apart: all files count.
    """
    if not (ROOT / ".git").exists():
        return sorted(
            {file for pattern in patterns for file in ROOT.glob(pattern) if file.is_file()}
        )
    command = ["git", "ls-files", "-z", "--", *(f":(glob){pattern}" for pattern in patterns)]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(ROOT / name for name in names.split("\0") if name)


def copy_example(workspace: Path, *parts: str) -> None:
    """Copy the committed example into a workspace: those of its folders ``probes``, ``layouts`` and ``reports``."""
    for file in tracked(*(f"{part}/{EXAMPLE}/**" for part in parts)):
        copy = workspace / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
