"""The workspace: the folder that holds ``probes/``, ``layouts/``, ``reports/`` and ``runs/``, by the same names."""

from __future__ import annotations

import platform
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spkv_nas.errors import UserError


@dataclass(frozen=True)
class Workspace:
    """Where results live. ``name`` is the same in all folders."""

    root: Path

    def probe_dir(self, name: str) -> Path:
        """Density tables: ``probes/<name>/``."""
        return self.root / "probes" / name

    def layout_dir(self, name: str) -> Path:
        """Layouts and their coverage: ``layouts/<name>/``."""
        return self.root / "layouts" / name

    def report_dir(self, name: str) -> Path:
        """Comparison and report: ``reports/<name>/``."""
        return self.root / "reports" / name

    def run_dir(self, name: str) -> Path:
        """Checkpoints and caches: ``runs/<name>/``."""
        return self.root / "runs" / name

    def check_writable(self) -> None:
        """Raise ``UserError`` now rather than after an hour of work if nothing can be written here."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise UserError(
                f"the workspace {self.root} cannot be written: {error.strerror or error}\n"
                "choose a writable folder with --workspace"
            ) from error


@cache
def environment() -> dict[str, str]:
    """Versions of what made a result, the platform, and the commit of the source checkout where there is one."""
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
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()
