"""Compute what attention costs, with times where they were measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.units import ITEM_BYTES
from spkv_nas.cost import formulas
from spkv_nas.cost.calibration import Calibration, Phase
from spkv_nas.cost.formulas import Cost, layout_density
from spkv_nas.stages.attention_times import calibrate_command, read_times
from spkv_nas.stages.contexts import beyond_positions, choose_context
from spkv_nas.stages.engines import check_no_sliding_layers
from spkv_nas.stages.options.calibrate import CalibrateOptions
from spkv_nas.stages.plan.attention.options import AttentionOptions
from spkv_nas.stages.plan.attention.served import ServedLayouts, plan_layouts
from spkv_nas.stages.sized_model import SizedModel


@dataclass(frozen=True)
class AttentionCosts:
    """Result of ``plan attention``.

    Attributes:
        name: name of the level or model, as the user gave it.
        shape: shape of the model.
        context: tokens in the cache.
        costs: costs of full attention, of each layout and of a density, in this order.
        times: source of the seconds in ``costs``; None if nothing was measured that fits.
        remedy: command that measures times, if there are none; at most one.
        served: caches of full attention and of layouts in a serving engine; None without one.
    """

    name: str
    shape: Shape
    context: int
    costs: list[Cost]
    times: Calibration | None
    remedy: list[str]
    served: ServedLayouts | None = None


def attention(options: AttentionOptions, reporter: Reporter = SILENT) -> AttentionCosts:
    """Compute the cost of full attention, of each layout and at a density, for a level of the ladder or a model.

    Times come from the calibration that options name, or else from that of the level's or model's name if it exists
    and fits; a caution says why it does not.
    """
    # Choose model and context
    subject = SizedModel.of(options.level, options.model)
    shape = subject.shape
    tokens = choose_context(options.context, subject.positions)
    if (remark := beyond_positions(tokens, subject.positions)) is not None:
        reporter.caution(remark)
    # Read layouts and find times for their windows
    layouts = [Layout.read(path) for path in options.layout or []]
    native = subject.native_windows
    shares = [layout_density(shape, layout, native) for layout in layouts]
    windows = [layout.window for layout in layouts] + ([options.window] if options.density is not None else [])
    windows += sorted({window for window in native if window is not None and window < tokens})
    calibrate = CalibrateOptions(
        level=options.level,
        model=options.model,
        name=options.calibration or subject.name,
        workspace=options.workspace,
    )
    times, remedy = None, calibrate_command(calibrate, windows, tokens)
    if options.calibration or (options.folders.report_dir(subject.name) / "calibration.yaml").is_file():
        try:
            times, remedy = read_times(calibrate, windows, tokens, shape), []
        except UserError as error:
            if options.calibration is not None:
                raise
            reporter.caution(str(error))
            remedy = []
    # Compute a row for full attention, each layout, and the density
    common: Any = {"native_windows": native, "element_size": ITEM_BYTES[options.kv_dtype or "bfloat16"]}
    rows = [_timed(formulas.cost("full attention", shape, tokens, **common), subject, tokens, times)]
    for layout, share in zip(layouts, shares, strict=True):
        title = f"{layout.strategy}, {layout.num_global} of {layout.num_heads} heads"
        row = formulas.cost(title, shape, tokens, density=share, window=layout.local_keys, **common)
        rows.append(_timed(row, subject, tokens, times, layout))
    if options.engine is not None:
        check_no_sliding_layers(subject.num_sliding)
    served = plan_layouts(options, shape, [row.name for row in rows], layouts, tokens)
    if options.density is not None:
        title = f"SP-KV, density {options.density:g}"
        sinks = options.sinks or 0
        row = formulas.cost(title, shape, tokens, density=options.density, window=options.window + sinks, **common)
        rows.append(_timed(row, subject, tokens, times, window=options.window, sinks=sinks))
    if subject.is_mixture:
        rows = [replace(row, total_flops=None) for row in rows]
    return AttentionCosts(subject.title, shape, tokens, rows, times, remedy, served)


def _timed(
    row: Cost,
    subject: SizedModel,
    context: int,
    times: Calibration | None,
    layout: Layout | None = None,
    *,
    window: int = 0,
    sinks: int = 0,
) -> Cost:
    """Add times to a cost: those of the layout, or of the cost's density in every layer."""

    def seconds(phase: Phase) -> float | None:
        """Return the seconds of a phase; None where the times do not cover it."""
        if times is None or not times.covers(context, phase):
            return None
        native = subject.native_windows
        if layout is not None:
            return times.layout_seconds(layout, context, phase, native_windows=native)
        shares = [row.density] * subject.shape.num_layers
        return times.model_seconds(shares, context, window=window, sinks=sinks, native_windows=native, phase=phase)

    return replace(row, decode_seconds=seconds("decode"), prefill_seconds=seconds("prefill"))
