"""Declare the options of the ``reproduce scaling`` command, and run it; its docstring is the help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.base.progress import Reporter
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace
from spkv_nas.stages.result import Result

Runs = Annotated[
    Path | None,
    Flag(
        "CSV with a row per run. Columns: train_flops (training compute), nll (nats per token); optional: name, "
        "variant (such as dense or sp-kv, each fitted separately) and held_out (1: predicted, not fitted).",
        argument=True,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ScalingOptions(InWorkspace):
    """Options of the ``reproduce scaling`` command."""

    runs: Runs = default(None, "the paper's levels")
    name: flags.Name = None


def scaling(options: ScalingOptions, reporter: Reporter) -> Result:
    """Fit the scaling law L(C) = L_inf + A C^-alpha to training runs, by default the paper's.

    Needs at least four runs of different compute per variant. Predicts the held-out runs. Writes
    reports/NAME/scaling.yaml and a figure.
    """
    from spkv_nas.contrib.reproduce.scaling import stage

    return Result(stage.scaling(options.folders, options.runs, options.name), stage.show)
