"""Run the ``reproduce scaling`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.reproduce.scaling.options import ScalingOptions
from spkv_nas.stages.result import Result


def scaling(options: ScalingOptions, reporter: Reporter) -> Result:
    """Fit the scaling law L(C) = L_inf + A C^-alpha to training runs, by default the paper's.

    Needs at least four runs of different compute per variant. Predicts the held-out runs, and the last run from the
    others. Writes reports/NAME/scaling.yaml and a figure.
    """
    from spkv_nas.stages.reproduce.scaling import stage

    return Result(stage.scaling(options), stage.show)
