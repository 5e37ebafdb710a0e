"""The version of the package, and of everything else that made a result."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__version__ = "0.1.0"
COMMIT_FILE = Path(__file__).with_name("commit.txt")  # not in a checkout: hatch_build.py puts it into what it builds


@cache
def environment() -> dict[str, str]:
    """Versions of what made a result, the platform, and the commit of the source."""
    packages = ("spkv-nas", "torch", "transformers", "numpy")
    versions = {package: _version(package) for package in packages}
    return {
        **versions,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "commit": _commit(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Of the source that a wheel was built from, or else of the checkout."""
    try:
        return COMMIT_FILE.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return checkout_commit(COMMIT_FILE.parents[2])


def checkout_commit(root: Path) -> str:
    """What git calls the commit of the checkout at ``root``, with "-dirty" where files differ from it; "unknown" where
    it is none: a folder inside another project's checkout has nothing to do with that one's commits.
    """
    if not (root / ".git").exists():
        return "unknown"
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()
