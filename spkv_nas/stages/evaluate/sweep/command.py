"""Run the ``evaluate sweep`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.evaluate.evaluation import Evaluation
from spkv_nas.stages.evaluate.sweep.options import SweepOptions
from spkv_nas.stages.result import Result


def sweep(options: SweepOptions, reporter: Reporter) -> Result:
    """Measure NLL and density at many thresholds. Writes reports/NAME/tau-sweep.csv and its figure.

    The checkpoint needs gates; open gates are the baseline. Without --data, the text is the held-out standard
    library text of the embedded models.
    """
    from spkv_nas.stages.evaluate.sweep import stage

    return Result(stage.sweep(options, reporter), stage.show, stage.document)


SWEEP = Evaluation("sweep", sweep, distributed=True)
