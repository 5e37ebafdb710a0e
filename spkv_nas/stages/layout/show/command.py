"""Declare the options of the ``layout show`` command, and run it; its docstring is the help."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.base.flag import default
from spkv_nas.base.progress import Reporter
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace
from spkv_nas.stages.result import Result


@dataclass(frozen=True, kw_only=True)
class ShowLayoutsOptions(InWorkspace):
    """Options of the ``layout show`` command."""

    files: flags.LayoutFiles
    probe: flags.OptionalProbe = default(note="Used to compute coverage.")


def show(options: ShowLayoutsOptions, reporter: Reporter) -> Result:
    """Print layouts as grids of global (G) and local (L) heads, with each layer's number of global heads."""
    from spkv_nas.stages.layout.show import stage

    return Result(stage.read_layouts(options.files, options.probe, options.folders), stage.show, stage.document)
