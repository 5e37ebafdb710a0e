"""Find attention times for a model: those of a calibration if it fits, else lower bounds (roofline)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Announce, silent
from spkv_nas.base.units import parse_context
from spkv_nas.base.workspace import Workspace
from spkv_nas.cost.calibration import Calibration, default_contexts
from spkv_nas.cost.roofline import Roofline, find_hardware
from spkv_nas.cost.times import AttentionTimes
from spkv_nas.stages.calibrate.options import CalibrateOptions
from spkv_nas.stages.commands import command_line, next_line


def find_times(
    workspace: Workspace,
    name: str,
    shape: Shape,
    windows: Sequence[int],
    context: int,
    *,
    calibration: str | None = None,
    hardware: str | None = None,
    element_size: int = 2,
    calibrate: CalibrateOptions | None = None,
    caution: Announce = silent,
) -> AttentionTimes:
    """Return attention times from a calibration, by default that of the results ``name`` if it fits, or the roofline.

    Args:
        workspace: workspace to look for calibrations in.
        name: name of the results.
        shape: shape of the model.
        windows: windows in tokens that times are needed for.
        context: tokens in the cache.
        calibration: name of the calibration to use; None: ``name``, if it fits.
        hardware: hardware of the roofline; None: h200.
        element_size: bytes per cached number.
        calibrate: options that would measure a calibration of the model, for the error's suggestion.
        caution: called with the reason if the calibration ``name`` does not fit.

    Raises:
        UserError: ``calibration`` does not exist or does not fit, or ``hardware`` is unknown.
    """
    if calibration is not None and hardware is not None:
        raise UserError("give --calibration or --hardware, not both")
    # Prefer a calibration
    if hardware is None and (calibration is not None or (workspace.report_dir(name) / "calibration.yaml").is_file()):
        try:
            return _find_calibration(workspace, calibration or name, shape, windows, context)
        except UserError as error:
            command = _calibrate_command(calibrate, windows, context)
            if calibration is not None:
                raise UserError("\n".join([str(error), *command])) from error
            caution("\n".join([str(error), "using roofline times instead", *command]))
    # Fall back to the roofline
    return Roofline(find_hardware(hardware or "h200"), shape, element_size)


def _calibrate_command(options: CalibrateOptions | None, windows: Sequence[int], context: int) -> list[str]:
    """Suggest the command that measures a calibration for a window and a context, unless windows differ."""
    if options is None or len(set(windows)) > 1:
        return []
    for window in windows:
        options = replace(options, window=window)
    measured = default_contexts(parse_context(options.context))
    if not measured[0] <= context <= measured[-1]:
        options = replace(options, context=str(context))
    return [next_line(command_line(options))]


def _find_calibration(
    workspace: Workspace, name: str, shape: Shape, windows: Sequence[int], context: int
) -> Calibration:
    """Read a calibration of the workspace. Raises ``UserError`` if it does not exist or does not fit."""
    folder = workspace.report_dir(name)
    if not (folder / "calibration.yaml").is_file():
        raise UserError(f"no calibration '{name}' in {folder.parent}: measure one with calibrate")
    calibration = Calibration.read(folder)
    calibration.check_shape(shape)
    for window in windows:
        calibration.check_window(window)
    calibration.check_context(context, "decode")
    return calibration
