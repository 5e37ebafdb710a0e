"""Puts the commit into every wheel and source distribution, whose results then say what made them."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    """Writes ``spkv_nas.base.version.COMMIT_FILE``, unless what is built is installed as it lies there, for editing."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        source = runpy.run_path(str(root / "spkv_nas" / "base" / "version.py"))
        file: Path = source["COMMIT_FILE"]
        if version == "editable" or file.exists():  # in a source distribution it is there
            return
        self._folder = tempfile.TemporaryDirectory()
        written = Path(self._folder.name) / file.name
        written.write_text(f"{source['checkout_commit'](root)}\n", encoding="utf-8")
        build_data["force_include"][str(written)] = file.relative_to(root).as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()
