"""Define an export target: the windows of all KV heads, beside an unchanged checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.base.flag import Flag
from spkv_nas.model.export.target import ExportTarget, Hybrid, TargetError, Written


@dataclass(frozen=True)
class WindowsTarget(ExportTarget):
    """Write windows.json: one list per layer, of each KV head's window or null."""

    name = "windows"
    help = "windows.json beside the dense checkpoint"

    indent: Annotated[int, Flag("Spaces of indentation.", low=0, high=8)] = 0

    def can_express(self, config, layout) -> str | None:
        return "its local heads see sink tokens" if layout.sinks else None

    def write(self, hybrid: Hybrid, folder: Path) -> Written:
        from spkv_nas.model.attach import detached  # imports torch

        layout = hybrid.layout
        with detached(hybrid.model):  # dense inside the block
            weights = hybrid.save(folder)
        windows = [[None if head == "G" else layout.window for head in row] for row in layout.heads]
        (folder / "windows.json").write_text(json.dumps(windows, indent=self.indent or None))
        return Written("a dense checkpoint with windows.json", weights)

    def verify(self, hybrid: Hybrid, folder: Path) -> str:
        windows = json.loads((folder / "windows.json").read_text())
        if sum(row.count(None) for row in windows) != hybrid.layout.num_global:
            raise TargetError("windows.json has another number of global heads")
        return "its windows are those of the layout"
