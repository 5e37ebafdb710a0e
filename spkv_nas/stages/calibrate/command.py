"""Run the ``calibrate`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.calibrate.options import CalibrateOptions
from spkv_nas.stages.result import Result


def calibrate(options: CalibrateOptions, reporter: Reporter) -> Result:
    """Measure attention times on this machine, for 0 up to all KV heads of a layer global.

    Writes reports/NAME/calibration.csv and .yaml, which spkv-nas plan attention uses. Decoding is measured at 1k, 4k,
    16k, ... tokens up to --context; prefill only up to the length at which one call takes about 4 seconds.
    """
    from spkv_nas.stages.calibrate import output, stage

    return Result(stage.calibrate(options, reporter), output.calibration, output.document)
