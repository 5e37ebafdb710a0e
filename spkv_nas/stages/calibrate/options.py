"""Declare the options of the ``calibrate`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.base.flag import default
from spkv_nas.stages import flags
from spkv_nas.stages.options import REFERENCE, InWorkspace, OnDevice


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(InWorkspace, OnDevice):
    """Options of the ``calibrate`` command."""

    level: flags.Level = None
    model: flags.OptionalModel = default(None, REFERENCE, note="A config file is enough.")
    context: flags.Context = default("32k", note="The longest length that is measured.")
    batch: flags.Batch = 1
    window: flags.Window = 128
    dtype: flags.Dtype = default(None, "float32 on CPU, else bfloat16")
    name: flags.Name = default(None, "the level's or model's")


def check(options: CalibrateOptions) -> None:
    """Check the model, context and dtype."""
    from spkv_nas.base.device import check_dtype
    from spkv_nas.base.units import parse_context
    from spkv_nas.stages.checks import check_model_size

    parse_context(options.context)
    check_dtype(options.dtype)
    check_model_size(options.level, options.model)
    options.folders.check_writable()
