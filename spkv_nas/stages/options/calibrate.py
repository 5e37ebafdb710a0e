"""Declare the options of the ``calibrate`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass

from spkv_nas.base import device, flag, units
from spkv_nas.stages import flags
from spkv_nas.stages.options import REFERENCE, InWorkspace, OnDevice


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(InWorkspace, OnDevice):
    """Measure attention times on this machine, for 0 up to all KV heads of a layer global.

    Writes reports/NAME/calibration.csv and .yaml, which spkv-nas plan attention uses. Decoding is measured at 1k, 4k,
    16k, ... tokens up to --context.
    """

    level: flags.Level = None
    model: flags.OptionalModel = flag.default(None, REFERENCE, note="A config file is enough.")
    context: flags.Context = flag.default("32k", note="The longest length that is measured.")
    batch: flags.Batch = 1
    window: flags.Window = 128
    dtype: flags.Dtype = flag.default(None, "float32 on CPU, else bfloat16")
    name: flags.Name = flag.default(None, "the level's or model's")


def check(options: CalibrateOptions) -> None:
    """Check the model, context and dtype."""
    from spkv_nas.stages.checks import check_model_size

    units.parse_context(options.context)
    device.check_dtype(options.dtype)
    check_model_size(options.level, options.model)
    options.folders.check_writable()
