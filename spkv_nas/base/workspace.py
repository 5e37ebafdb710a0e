"""The workspace: the folder that holds ``probes/``, ``layouts/``, ``reports/`` and ``runs/``, by the same names."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import is_file
from spkv_nas.base.names import check_name
from spkv_nas.base.replace import settle

_PROBES, _REPORTS = "probes", "reports"
BUDGETS, SEARCH = LAYOUT_FOLDERS = ("budgets", "search")  # below ``layouts/<name>/``: layouts of a range, of a search


@dataclass(frozen=True)
class Workspace:
    """Where results live. ``name`` is the same in all folders.

    Every folder is one below its kind's (``check_name`` sees to it), and whole: a result that a killed command had
    decided on is moved to its place when its folder is asked for.
    """

    root: Path

    def probe_dir(self, name: str) -> Path:
        """Density tables: ``probes/<name>/``."""
        return self._dir(_PROBES, name)

    def probes(self) -> list[str]:
        """The names of the density tables that are there, sorted; hidden folders are none."""
        names = (table.parent.name for table in (self.root / _PROBES).glob("*/density.csv"))
        return sorted(name for name in names if not name.startswith("."))

    @property
    def reports(self) -> Path:
        """The folder of all reports."""
        return self.root / _REPORTS

    def layout_dir(self, name: str) -> Path:
        """Layouts and their coverage: ``layouts/<name>/``."""
        folder = self._dir("layouts", name)
        for inner in LAYOUT_FOLDERS:
            settle(folder / inner)
        return folder

    def report_dir(self, name: str) -> Path:
        """Comparison and report: ``reports/<name>/``."""
        return self._dir(_REPORTS, name)

    def run_dir(self, name: str) -> Path:
        """Checkpoints and caches: ``runs/<name>/``."""
        return self._dir("runs", name)

    def _dir(self, kind: str, name: str) -> Path:
        folder = self.root / kind / check_name(name, "the name")
        for place in (self.root, folder.parent, folder):
            if is_file(place):
                raise UserError(f"{place} is a file, where the workspace has a folder: move it away")
        settle(folder)
        return folder

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
