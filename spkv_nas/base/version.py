"""Versions of the package and its environment, recorded with every result."""

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__version__ = "0.1.0"
COMMIT_FILE = Path(__file__).with_name("commit.txt")  # of built packages, by hatch_build.py
PACKAGES = ("spkv-nas", "torch", "transformers", "numpy")


@cache
def environment() -> dict[str, str]:
    """Return the versions of the package and its main dependencies, the platform, and the source commit."""
    versions = {package: _version(package) for package in PACKAGES}
    versions["python"] = platform.python_version()
    versions["platform"] = f"{platform.system()} {platform.machine()}"
    versions["commit"] = _commit()
    return versions


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the commit that a wheel was built from, or that of the checkout."""
    try:
        return COMMIT_FILE.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return checkout_commit(COMMIT_FILE.parents[2])


def checkout_commit(root: Path) -> str:
    """Return ``git describe`` of a checkout, with "-dirty" if files are modified; "unknown" without one."""
    if not (root / ".git").exists():  # it may lie in the checkout of another project
        return "unknown"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return process.stdout.strip()
