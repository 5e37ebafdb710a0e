"""Declare the ``calibrate`` command: its options, their check, and its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.progress import Reporter
from spkv_nas.stages import flags
from spkv_nas.stages.options import REFERENCE, InWorkspace, OnDevice
from spkv_nas.stages.result import Result

TrainStep = Annotated[
    bool,
    Flag("Time whole training steps, with gates and with a layout, against full attention.", ("--train-step",)),
]
_OF_ATTENTION = ("context", "batch", "window", "dtype", "name")  # options without effect with --train-step


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(InWorkspace, OnDevice):
    """Options of the ``calibrate`` command."""

    level: flags.Level = None
    model: flags.OptionalModel = default(None, REFERENCE, note="A config file is enough.")
    context: flags.Context = default("32k", note="The longest length that is measured.")
    batch: flags.Batch = 1
    window: flags.Window = 128
    dtype: flags.Dtype = default(None, "float32 on CPU, else bfloat16")
    train_step: TrainStep = False
    name: flags.Name = default(None, "the level's or model's")


def check(options: CalibrateOptions) -> None:
    """Check the model, context and dtype; with ``train_step`` most options do not apply."""
    from spkv_nas.base.device import check_dtype
    from spkv_nas.base.units import parse_context
    from spkv_nas.stages.checks import check_model_size

    parse_context(options.context)
    check_dtype(options.dtype)
    check_model_size(options.level, None if options.train_step else options.model)
    if not options.train_step:
        options.folders.check_writable()
        return
    for name in _OF_ATTENTION:
        if getattr(options, name) != type(options).__dataclass_fields__[name].default:
            raise UserError(
                f"--{name} has no effect with --train-step, whose batch and length are fixed: remove --{name}"
            )
    if options.model is not None:
        raise UserError("--train-step does not take --model: give a level of the ladder")


def calibrate(options: CalibrateOptions, reporter: Reporter) -> Result:
    """Measure attention times on this machine, for 0 up to all KV heads of a layer global.

    Writes reports/NAME/calibration.csv and .yaml, which spkv-nas plan attention uses. Decoding is measured at 1k, 4k,
    16k, ... tokens up to --context; prefill only up to the length at which one call takes about 4 seconds. With
    --train-step, prints the time of a training step of a gated model and writes nothing.
    """
    from spkv_nas.stages.calibrate import output, stage

    if options.train_step:
        return Result(stage.time_training_step(options, reporter), output.training_steps)
    return Result(stage.calibrate(options, reporter), output.calibration, output.document)
