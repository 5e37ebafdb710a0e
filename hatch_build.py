"""Puts into what is built: the commit, so that results say what made them, and the tested versions, whose text is a
source.
"""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuiltFilesHook(BuildHookInterface):
    """Adds ``base.version.COMMIT_FILE``, and to a wheel the file of ``base.assets.constraints_file``; nothing to what
    is installed as it lies there, for editing.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        if self.target_name == "wheel":
            build_data["force_include"][str(root / "constraints.txt")] = "spkv_nas/assets/constraints.txt"
        source = runpy.run_path(str(root / "spkv_nas" / "base" / "version.py"))
        file: Path = source["COMMIT_FILE"]
        if file.exists():  # in a source distribution it is there
            return
        self._folder = tempfile.TemporaryDirectory()
        written = Path(self._folder.name) / file.name
        written.write_text(f"{source['checkout_commit'](root)}\n", encoding="utf-8")
        build_data["force_include"][str(written)] = file.relative_to(root).as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()
