"""Cost: compute what attention costs, with measured times or roofline bounds, and calibrate the times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spkv_nas.artifacts.defaults import LADDER_DENSITY
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.device import choose_device
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Announce, Reporter, silent
from spkv_nas.base.units import parse_context
from spkv_nas.base.workspace import Workspace
from spkv_nas.cost import formulas
from spkv_nas.cost.calibration import Calibration, LayerCase, default_contexts
from spkv_nas.cost.formulas import Cost, layout_density
from spkv_nas.cost.ladder import find_level, flops_table, write_flops_table
from spkv_nas.cost.roofline import Roofline, find_hardware
from spkv_nas.cost.times import AttentionTimes, Phase
from spkv_nas.stages.checks import check
from spkv_nas.stages.commands import command_line, next_line
from spkv_nas.stages.contexts import beyond_positions, choose_context
from spkv_nas.stages.names import model_name
from spkv_nas.stages.options import PAPER, REFERENCE, CalibrateOptions, CostOptions

if TYPE_CHECKING:
    from spkv_nas.training.step_timing import StepTiming


@dataclass(frozen=True)
class CostResult:
    """Result of ``cost``.

    Attributes:
        name: name of the level or model, as the user gave it.
        shape: shape of the model.
        context: tokens in the cache.
        costs: costs of full attention, of each layout and of a density, in this order.
        times: source of the seconds in ``costs``.
        figure: path of the figure of FLOPs over the ladder; None unless requested.
    """

    name: str
    shape: Shape
    context: int
    costs: list[Cost]
    times: AttentionTimes
    figure: Path | None = None


@dataclass(frozen=True)
class CalibrationResult:
    """Calibration, with the name and folder that it was written to."""

    name: str
    calibration: Calibration
    folder: Path


@dataclass(frozen=True)
class _Sized:
    """Model to compute costs of.

    Attributes:
        name: name of its results.
        title: name to show to users.
        shape: shape of the model.
        positions: maximum number of tokens that the model was made for; None: unknown.
    """

    name: str
    title: str
    shape: Shape
    positions: int | None = None

    @classmethod
    def of(cls, level: str | None, model: str | None) -> _Sized:
        """Look up a level of the ladder, a model, or the embedded reference. Raises ``UserError`` for both at once."""
        if level is not None and model is not None:
            raise UserError("give a level of the ladder or --model, not both")
        if level is not None:
            return cls(level, level, find_level(level).shape)
        from spkv_nas.model.checkpoint import check_dense, read_size

        source = model or REFERENCE
        size = read_size(source)
        check_dense(size, source)
        return cls(model_name(source), source, size.shape, size.positions)


def calibrate(options: CalibrateOptions, reporter: Reporter = SILENT) -> CalibrationResult:
    """Time the attention of a level or model on this machine and write ``reports/<name>/``."""
    from spkv_nas.cost.timing import time_attention

    # Describe an attention layer of the model
    subject = _Sized.of(options.level, options.model)
    shape, device = subject.shape, choose_device(options.device)
    contexts = default_contexts(parse_context(options.context))
    case = LayerCase(
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        options.dtype or ("float32" if device == "cpu" else "bfloat16"),
        options.window,
        options.batch,
        device,
    )
    # Time it
    options.folders.check_writable()
    name = options.name or subject.name
    folder = options.folders.report_dir(name)
    with reporter.bar("measuring") as progress:
        calibration = time_attention(case, contexts, progress=progress)
    calibration.write(folder)
    return CalibrationResult(name, calibration, folder)


def time_training_step(options: CalibrateOptions, reporter: Reporter = SILENT) -> list[StepTiming]:
    """Time whole training steps of a level, or on CPU of the embedded models, against full attention."""
    from spkv_kernels.timing import device_name

    from spkv_nas.training.step_timing import time_embedded_steps, time_level_steps

    device = choose_device(options.device)
    check(options)
    if options.level is None and device != "cpu":
        raise UserError("--train-step times a level of the ladder, or on the CPU the embedded models: give a level")
    subject = options.level or "the embedded models"
    reporter.announce(f"timing training steps of {subject} on {device_name(device)}")
    if options.level is None:
        return time_embedded_steps()
    return time_level_steps(find_level(options.level), device=device)


def cost(options: CostOptions, reporter: Reporter = SILENT) -> CostResult:
    """Compute the cost of full attention, of each layout and at a density, for a level of the ladder or a model.

    Times come from the calibration that options name. Without one, and without ``hardware``, they come from the
    calibration of the level's or model's name if it fits (a caution says why it does not), else from the roofline.
    """
    # Choose model and context
    subject = _Sized.of(options.level, options.model)
    shape, size = subject.shape, options.element_size
    tokens = choose_context(options.context, subject.positions)
    if (remark := beyond_positions(tokens, subject.positions)) is not None:
        reporter.caution(remark)
    # Read layouts and find times for their windows
    layouts = [Layout.read(path) for path in options.layout or []]
    shares = [layout_density(shape, layout) for layout in layouts]
    windows = [layout.window for layout in layouts] + ([options.window] if options.density is not None else [])
    times = find_times(
        options.folders,
        subject.name,
        shape,
        windows,
        tokens,
        calibration=options.calibration,
        hardware=options.hardware,
        element_size=size,
        caution=reporter.caution,
        calibrate=CalibrateOptions(
            level=options.level, model=options.model, name=options.calibration, workspace=options.workspace
        ),
    )
    # Compute a row for full attention, each layout, and the density
    rows = [_timed(formulas.cost("full attention", shape, tokens, element_size=size), shape, tokens, times)]
    for layout, share in zip(layouts, shares, strict=True):
        title = f"{layout.strategy}, {layout.num_global} of {layout.num_heads} heads"
        row = formulas.cost(title, shape, tokens, density=share, window=layout.window, element_size=size)
        rows.append(_timed(row, shape, tokens, times, layout))
    if options.density is not None:
        title = f"SP-KV, density {options.density:g}"
        row = formulas.cost(title, shape, tokens, density=options.density, window=options.window, element_size=size)
        rows.append(_timed(row, shape, tokens, times, window=options.window))
    return CostResult(subject.title, shape, tokens, rows, times, draw_flops(options) if options.figure else None)


def _timed(
    row: Cost, shape: Shape, context: int, times: AttentionTimes, layout: Layout | None = None, *, window: int = 0
) -> Cost:
    """Add times to a cost: those of the layout, or of the cost's density in every layer."""

    def seconds(phase: Phase) -> float | None:
        """Return the seconds of a phase; None where the times do not cover it."""
        if not times.covers(context, phase):
            return None
        if layout is not None:
            return times.layout_seconds(layout, context, phase)
        return shape.num_layers * times.layer_seconds(context, density=row.density, window=window, phase=phase)

    return replace(row, decode_seconds=seconds("decode"), prefill_seconds=seconds("prefill"))


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
            caution("\n".join([str(error), "so times are the roofline's", *command]))
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
        raise UserError(f"no calibration '{name}' in {folder.parent}: measure it first")
    calibration = Calibration.read(folder)
    calibration.check_shape(shape)
    for window in windows:
        calibration.check_window(window)
    calibration.check_context(context, "decode")
    return calibration


def draw_flops(options: CostOptions) -> Path:
    """Draw FLOPs of the paper's ladder against model size, dense and at a density; return the picture's path."""
    from spkv_nas.report.cost_charts import flops_charts
    from spkv_nas.report.plot import save_chart

    tokens = choose_context(options.context, None)
    density = LADDER_DENSITY if options.density is None else options.density
    rows = flops_table(tokens, density)
    options.folders.check_writable()
    folder = options.folders.report_dir(options.name or PAPER)
    write_flops_table(folder, rows)
    save_chart(folder, flops_charts(rows, tokens, density))
    return folder / "flops.png"
