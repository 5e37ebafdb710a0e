"""Declare the options of the ``calibrate`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.stages import flags
from spkv_nas.stages.options import REFERENCE, InWorkspace, OnDevice

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
