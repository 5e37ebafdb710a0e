"""Run the ``layout show`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.layout.show.options import ShowLayoutsOptions
from spkv_nas.stages.result import Result


def show(options: ShowLayoutsOptions, reporter: Reporter) -> Result:
    """Print layouts as grids of global (G) and local (L) heads, with each layer's number of global heads."""
    from spkv_nas.stages.layout.show import stage

    return Result(stage.read_layouts(options), stage.show, stage.document)
