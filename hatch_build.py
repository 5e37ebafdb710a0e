"""Add the commit and the tested versions to distributions, so that results can record what made them."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuiltFilesHook(BuildHookInterface):
    """Add ``base.version.COMMIT_FILE``, and to wheels ``base.assets.constraints_file``; skip editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the commit to a temporary file, and add both files to the distribution."""
        if version == "editable":
            return
        root = Path(self.root)
        if self.target_name == "wheel":
            build_data["force_include"][str(root / "constraints.txt")] = (
                "spkv_nas/assets/constraints.txt"
            )
        source = runpy.run_path(str(root / "spkv_nas" / "base" / "version.py"))
        file: Path = source["COMMIT_FILE"]
        if file.exists():  # a source distribution already has it
            return
        self._folder = tempfile.TemporaryDirectory()
        commit_file = Path(self._folder.name) / file.name
        commit_file.write_text(f"{source['checkout_commit'](root)}\n", encoding="utf-8")
        build_data["force_include"][str(commit_file)] = file.relative_to(root).as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary file."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
