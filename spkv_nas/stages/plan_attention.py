"""Compute what attention costs, with times where they were measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base import console, errors, progress, units
from spkv_nas.cost import calibration, formulas
from spkv_nas.stages.commands import Result, command_line, next_line
from spkv_nas.stages.context import choose_context
from spkv_nas.stages.options.calibrate import CalibrateOptions
from spkv_nas.stages.options.plan_attention import AttentionOptions
from spkv_nas.stages.sized_model import SizedModel


@dataclass(frozen=True)
class AttentionCosts:
    """Result of ``plan attention``."""

    name: str  # name of the level or model, as the user gave it
    shape: Shape  # shape of the model
    context: int  # tokens in the cache
    costs: list[formulas.Cost]  # of full attention, of each layout and of a density, in this order
    # Source of the seconds in ``costs``; None if nothing was measured that fits
    times: calibration.Calibration | None
    remedy: list[str]  # command that measures times, if there are none; at most one


@dataclass(frozen=True)
class _Costing:
    """Hold what the costs of all rows are computed for."""

    subject: SizedModel
    context: int  # tokens in the cache
    times: calibration.Calibration | None

    def full_attention(self) -> formulas.Cost:
        """Return the costs of full attention."""
        seconds = self._seconds([1.0] * self.subject.shape.num_layers, window=0, sinks=0)
        return self._cost("full attention", 1.0, 0, seconds)

    def layout(self, layout: Layout, density: float) -> formulas.Cost:
        """Return the costs of a layout, whose share of global heads is ``density`` (``layout_density``)."""
        title = f"{layout.strategy}, {layout.num_global} of {layout.num_heads} heads"
        # Times are measured with one window
        seconds = None
        if not layout.windows:
            seconds = self._seconds(layout, window=layout.window, sinks=layout.sinks)
        return self._cost(title, density, layout.window + layout.sinks, seconds, layout)

    def density(self, density: float, window: int, sinks: int) -> formulas.Cost:
        """Return the costs of SP-KV at a density."""
        shares = [density] * self.subject.shape.num_layers
        seconds = self._seconds(shares, window=window, sinks=sinks)
        return self._cost(f"SP-KV, density {density:g}", density, window + sinks, seconds)

    def _seconds(self, heads: Layout | list[float], *, window: int, sinks: int) -> float | None:
        """Return the seconds that decoding a token takes; None without times."""
        if self.times is None:
            return None
        return self.times.layout_seconds(heads, self.context, window=window, sinks=sinks)

    def _cost(
        self,
        title: str,
        density: float,
        window: int,
        seconds: float | None,
        layout: Layout | None = None,
    ) -> formulas.Cost:
        """Return a row; the FLOPs of a mixture of experts are not known."""
        counted = formulas.cost(
            title,
            self.subject.shape,
            self.context,
            density=density,
            window=window,
            native_windows=self.subject.native_windows,
            element_size=units.ITEM_BYTES["bfloat16"],
            layout=layout,
        )
        total_flops = None if self.subject.is_mixture else counted.total_flops
        return replace(counted, decode_seconds=seconds, total_flops=total_flops)


def run(options: AttentionOptions, reporter: progress.Reporter) -> Result:
    """Compute the cost of full attention, of each layout and at a density, for a level of the ladder or a model.

    Times come from the calibration that options name, or else from that of the level's or model's name if it exists
    and fits; a caution says why it does not.
    """
    # Choose model and context, and read layouts and times
    subject = SizedModel.of(options.level, options.model)
    tokens = choose_context(options.context, subject.positions, reporter)
    layouts = [Layout.read(path) for path in options.layout or []]
    shares = [
        formulas.layout_density(subject.shape, layout, subject.native_windows) for layout in layouts
    ]
    times, remedy = _times(options, subject, _windows(options, layouts), tokens, reporter)
    # Compute a row for full attention, each layout, and the density
    costing = _Costing(subject, tokens, times)
    costs = [costing.full_attention()]
    for layout, share in zip(layouts, shares, strict=True):
        costs.append(costing.layout(layout, share))
    if options.density is not None:
        costs.append(costing.density(options.density, options.window, options.sinks or 0))
    result = AttentionCosts(
        name=subject.title,
        shape=subject.shape,
        context=tokens,
        costs=costs,
        times=times,
        remedy=remedy,
    )
    return Result(result, show, document)


def _windows(options: AttentionOptions, layouts: Sequence[Layout]) -> list[int]:
    """Return the windows that times are needed for: of layouts with one window, and of the density."""
    windows = [layout.window for layout in layouts if not layout.windows]
    if options.density is not None:
        windows.append(options.window)
    return windows


def _times(
    options: AttentionOptions,
    subject: SizedModel,
    windows: Sequence[int],
    context: int,
    reporter: progress.Reporter,
) -> tuple[calibration.Calibration | None, list[str]]:
    """Return the times that options name or that fit, and the command that measures them if there are none."""
    name = options.calibration or subject.name
    folder = options.folders.report_dir(name)
    shape = subject.shape
    is_timed = not any(subject.native_windows) and not shape.expanded_dim
    remedy = _calibrate_command(options, name, windows, context) if is_timed else []
    if not options.calibration and not (folder / "calibration.yaml").is_file():
        return None, remedy
    # Read the calibration, and check that it fits
    try:
        if not is_timed:
            raise errors.UserError(
                "attention is not timed in models with sliding windows by design, "
                "or with latent attention"
            )
        times = calibration.Calibration.read(folder)
        times.check_shape(shape)
        for window in windows:
            times.check_window(window)
        times.check_context(context)
        return times, []
    except errors.UserError as error:
        message = "\n".join([str(error), *remedy])
        if options.calibration is not None:
            raise errors.UserError(message) from error
        reporter.caution(message)
        return None, []


def _calibrate_command(
    options: AttentionOptions, name: str, windows: Sequence[int], context: int
) -> list[str]:
    """Suggest the command that measures the times of a window and a context, unless windows differ."""
    if len(set(windows)) > 1:
        return []
    suggested = CalibrateOptions(
        level=options.level, model=options.model, name=name, workspace=options.workspace
    )
    for window in windows[:1]:
        suggested = replace(suggested, window=window)
    measured = calibration.default_contexts(units.parse_context(suggested.context))
    if not measured[0] <= context <= measured[-1]:
        suggested = replace(suggested, context=str(context))
    return [next_line(command_line(suggested))]


def show(result: AttentionCosts) -> None:
    """Print KV bytes, FLOPs and times of full attention, of layouts and of a density."""
    shape = result.shape
    times = result.times
    name = console.escape(result.name)
    console.out.print(
        f"[bold]{name}[/bold]: {shape.num_parameters / 1e6:,.4g} M parameters without embeddings, "
        f"{shape.words}; {result.context:,} tokens"
    )
    # Table of costs
    sizes = ("KV bytes\nper token", "KV cache\nMiB", "attention\nGFLOPs", "total\nGFLOPs")
    grid = console.Table("attention", *sizes, "decode\nµs", title="FLOPs and times are per token")
    for row in result.costs:
        grid.add_row(
            console.escape(row.name),
            f"{row.kv_bytes_per_token:,.0f}",
            f"{row.kv_cache_bytes / 2**20:,.2f}",
            f"{row.attention_flops / 1e9:,.4g}",
            "-" if row.total_flops is None else f"{row.total_flops / 1e9:,.4g}",
            units.format_microseconds(row.decode_seconds),
        )
    console.out.print(grid)
    # Where the times come from
    if times is None:
        console.say("\n".join(["times: not measured", *result.remedy]))
    else:
        console.out.print(f"times: attention of all layers, {console.escape(times.source)}")
    if result.costs[0].total_flops is None:
        console.out.print(
            "total: unknown for a mixture of experts, of which a token uses only some parameters"
        )


def document(result: AttentionCosts) -> dict[str, Any]:
    """Return KV bytes, FLOPs and times of full attention, of the layouts and of a density."""
    return {
        "name": result.name,
        "shape": result.shape,
        "context": result.context,
        "costs": result.costs,
        "times": None if result.times is None else result.times.source,
    }
