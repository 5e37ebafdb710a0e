"""Declare ``evaluate sweep``: its options, their check, and its help."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.artifacts import defaults
from spkv_nas.base.flag import default
from spkv_nas.base.progress import Reporter
from spkv_nas.stages import flags
from spkv_nas.stages.evaluate.evaluation import Evaluation
from spkv_nas.stages.evaluate.options import RECIPE_NAME
from spkv_nas.stages.options import REFERENCE, SubjectOptions
from spkv_nas.stages.result import Result


@dataclass(frozen=True, kw_only=True)
class SweepOptions(SubjectOptions):
    """Options of the ``evaluate sweep`` command."""

    model: flags.Model = REFERENCE
    taus: flags.Taus = "0.01..0.99"
    num_taus: flags.NumTaus = default(None, str(defaults.TAU_POINTS))
    name: flags.Name = default(None, RECIPE_NAME)


def check(options: SweepOptions) -> None:
    """Check the thresholds, the checkpoint and the text."""
    from spkv_nas.evaluation.thresholds import parse_taus
    from spkv_nas.stages.evaluate.checkpoints import evaluated

    parse_taus(options.taus, options.num_taus)
    evaluated(options).check()


def sweep(options: SweepOptions, reporter: Reporter) -> Result:
    """Measure NLL and density at many thresholds. Writes reports/NAME/tau-sweep.csv and its figure.

    The checkpoint needs gates; open gates are the baseline. Without --data, the text is the held-out standard
    library text of the embedded models.
    """
    from spkv_nas.stages.evaluate.sweep import output, stage

    return Result(stage.sweep(options, reporter), output.show, output.document)


SWEEP = Evaluation("sweep", sweep, distributed=True)
