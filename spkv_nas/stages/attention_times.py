"""Read the attention times that ``calibrate`` measured for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError
from spkv_nas.base.units import parse_context
from spkv_nas.cost.calibration import Calibration, default_contexts
from spkv_nas.stages.commands import command_line, next_line
from spkv_nas.stages.options.calibrate import CalibrateOptions


def read_times(options: CalibrateOptions, windows: Sequence[int], context: int, shape: Shape) -> Calibration:
    """Read the calibration that ``options`` would write, and check that it has the windows, context and heads.

    Raises:
        UserError: it does not exist or fit; suggests the command that measures it.
    """
    if len(set(windows)) > 1:
        needed = " and ".join(map(str, sorted(set(windows))))
        raise UserError(
            f"attention times are needed for windows of {needed} tokens, but a calibration measures one\n"
            "use layouts with the native window, or leave times out"
        )
    # Suggest the command that measures what is missing, whichever check fails
    try:
        calibration = Calibration.read(options.folders.report_dir(str(options.name)))
        calibration.check_shape(shape)
        for window in windows:
            calibration.check_window(window)
        calibration.check_context(context)
    except UserError as error:
        raise UserError("\n".join([str(error), *calibrate_command(options, windows, context)])) from error
    return calibration


def calibrate_command(options: CalibrateOptions, windows: Sequence[int], context: int) -> list[str]:
    """Suggest the command that measures a calibration for a window and a context, unless windows differ."""
    if len(set(windows)) > 1:
        return []
    for window in windows:
        options = replace(options, window=window)
    measured = default_contexts(parse_context(options.context))
    if not measured[0] <= context <= measured[-1]:
        options = replace(options, context=str(context))
    return [next_line(command_line(options))]
