"""The workspace: the folder that holds ``probes/``, ``layouts/``, ``reports/`` and ``runs/``, by the same names."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from spkv_nas.base.errors import UserError


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
