"""Run the ``reproduce ladder`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.reproduce.ladder.options import LadderOptions
from spkv_nas.stages.result import Result


def ladder(options: LadderOptions, reporter: Reporter) -> Result:
    """Compute FLOPs per token of the paper's model ladder: full attention, and SP-KV at a density.

    Writes reports/NAME/flops.csv and a figure of FLOPs against model size.
    """
    from spkv_nas.stages.reproduce.ladder import stage

    return Result(stage.ladder(options), stage.show)
