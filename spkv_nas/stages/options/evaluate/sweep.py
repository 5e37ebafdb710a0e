"""Declare the options of the ``evaluate sweep`` command, and check them; the class's docstring is the help."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.artifacts import defaults
from spkv_nas.base.flag import default
from spkv_nas.stages import flags
from spkv_nas.stages.evaluate.evaluation import RECIPE_NAME
from spkv_nas.stages.options import REFERENCE, SubjectOptions


@dataclass(frozen=True, kw_only=True)
class SweepOptions(SubjectOptions):
    """Measure NLL and density at many thresholds. Writes reports/NAME/tau-sweep.csv and its figure.

    The checkpoint needs gates; open gates are the baseline. Without --data, the text is the held-out standard
    library text of the embedded models.
    """

    model: flags.Model = REFERENCE
    taus: flags.Taus = "0.01..0.99"
    num_taus: flags.NumTaus = default(None, str(defaults.TAU_POINTS))
    name: flags.Name = default(None, RECIPE_NAME)


def check(options: SweepOptions) -> None:
    """Check the thresholds, the checkpoint and the text."""
    from spkv_nas.evaluation.thresholds import parse_taus
    from spkv_nas.stages.checkpoints import evaluated

    parse_taus(options.taus, options.num_taus)
    evaluated(options).check()
