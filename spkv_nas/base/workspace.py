"""Workspace: folder of ``probes/``, ``layouts/``, ``reports/`` and ``runs/``, each with the same result names."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from spkv_nas.base import errors, files, replace
from spkv_nas.base.names import check_name

_PROBES = "probes"
_REPORTS = "reports"
# Folders below ``layouts/<name>/``
BUDGETS = "budgets"  # of a range of budgets
SOLUTIONS = "solutions"  # of several solutions at one budget
SEARCH = "search"
LAYOUT_FOLDERS = (BUDGETS, SOLUTIONS, SEARCH)


@dataclass(frozen=True)
class Workspace:
    """Folders of results below one root; ``name`` is the same in all of them.

    Every folder is a direct child of its kind's folder (``check_name``), and complete: if a command was interrupted
    while it replaced a result, the replacement is completed when the folder is requested.
    """

    root: Path

    def probe_dir(self, name: str) -> Path:
        """Return the folder of a probe's tables, ``probes/<name>/``."""
        return self._dir(_PROBES, name)

    def probes(self) -> list[str]:
        """Return the names of all probes, sorted, without hidden folders."""
        names = (table.parent.name for table in (self.root / _PROBES).glob("*/density.csv"))
        return sorted(name for name in names if not name.startswith("."))

    @property
    def reports(self) -> Path:
        """Return the folder of all reports."""
        return self.root / _REPORTS

    def layout_dir(self, name: str) -> Path:
        """Return the folder of layouts and their coverage, ``layouts/<name>/``."""
        folder = self._dir("layouts", name)
        for inner in LAYOUT_FOLDERS:
            replace.settle(folder / inner)
        return folder

    def has_layouts(self, name: str) -> bool:
        """Return whether ``layouts/<name>/`` has layout files."""
        return any(self.layout_dir(name).glob("*.yaml"))

    def report_dir(self, name: str) -> Path:
        """Return the folder of a comparison and its report, ``reports/<name>/``."""
        return self._dir(_REPORTS, name)

    def run_dir(self, name: str) -> Path:
        """Return the folder of checkpoints and caches, ``runs/<name>/``."""
        return self._dir("runs", name)

    def _dir(self, kind: str, name: str) -> Path:
        """Return the folder of one result, completing an interrupted replacement."""
        folder = self.root / kind / check_name(name, "the name")
        for path in (self.root, folder.parent, folder):
            if files.is_file(path):
                raise errors.UserError(
                    f"{path} is a file, where the workspace has a folder: move it away"
                )
        replace.settle(folder)
        return folder

    def check_writable(self) -> None:
        """Raise ``UserError`` if the workspace cannot be written, to fail now and not after an hour of work."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise errors.UserError(
                f"the workspace {self.root} cannot be written: {error.strerror or error}\n"
                "choose a writable folder with --workspace"
            ) from error
