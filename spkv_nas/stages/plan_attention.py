"""Compute what attention costs, with times where they were measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base import console, errors, progress, units
from spkv_nas.cost import calibration, formulas
from spkv_nas.stages.commands import Result, command_line, next_line
from spkv_nas.stages.engines import Served, chosen_engine, serve
from spkv_nas.stages.options.calibrate import CalibrateOptions
from spkv_nas.stages.options.plan_attention import AttentionOptions
from spkv_nas.stages.sized_model import SizedModel, choose_context


@dataclass(frozen=True)
class AttentionCosts:
    """Result of ``plan attention``."""

    name: str  # name of the level or model, as the user gave it
    shape: Shape  # shape of the model
    context: int  # tokens in the cache
    costs: list[
        formulas.Cost
    ]  # costs of full attention, of each layout and of a density, in this order
    times: (
        calibration.Calibration | None
    )  # source of the seconds in ``costs``; None if nothing was measured that fits
    remedy: list[str]  # command that measures times, if there are none; at most one
    # Caches of full attention and of layouts in a serving engine; None without one
    served: Served | None = None


def run(options: AttentionOptions, reporter: progress.Reporter) -> Result:
    """Compute the cost of full attention, of each layout and at a density, for a level of the ladder or a model.

    Times come from the calibration that options name, or else from that of the level's or model's name if it exists
    and fits; a caution says why it does not.
    """
    # Choose model and context, and read layouts and times
    subject = SizedModel.of(options.level, options.model)
    shape = subject.shape
    native = subject.native_windows
    tokens = choose_context(options.context, subject.positions, reporter)
    layouts = [Layout.read(path) for path in options.layout or []]
    shares = [formulas.layout_density(shape, layout, native) for layout in layouts]
    needed = [layout.window for layout in layouts if not layout.windows]
    needed += [] if options.density is None else [options.window]
    times, remedy = _times(options, subject, needed, tokens, reporter)
    serving = chosen_engine(options)
    item = units.ITEM_BYTES[
        "bfloat16" if serving is None or serving.kv_dtype is None else serving.kv_dtype
    ]

    def row(
        name: str, heads: Layout | float, density: float, window: int, sinks: int
    ) -> formulas.Cost:
        layout = heads if isinstance(heads, Layout) else None
        by_layer = [heads] * shape.num_layers if isinstance(heads, float) else heads
        seconds = None
        if times is not None and not (
            layout and layout.windows
        ):  # times are measured with one window
            seconds = times.layout_seconds(by_layer, tokens, window=window, sinks=sinks)
        sizes: dict[str, Any] = {"native_windows": native, "element_size": item, "layout": layout}
        counted = formulas.cost(
            name, shape, tokens, density=density, window=window + sinks, **sizes
        )
        return replace(
            counted,
            decode_seconds=seconds,
            total_flops=None if subject.is_mixture else counted.total_flops,
        )

    # Compute a row for full attention, each layout, and the density
    rows = [row("full attention", 1.0, 1.0, 0, 0)]
    for layout, share in zip(layouts, shares, strict=True):
        title = f"{layout.strategy}, {layout.num_global} of {layout.num_heads} heads"
        rows.append(row(title, layout, share, layout.window, layout.sinks))
    served = _served(options, subject, [row.name for row in rows], layouts, tokens)
    if (density := options.density) is not None:
        rows.append(
            row(f"SP-KV, density {density:g}", density, density, options.window, options.sinks or 0)
        )
    return Result(
        AttentionCosts(subject.title, shape, tokens, rows, times, remedy, served), show, document
    )


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
                "attention is not timed in models with sliding windows by design, or with latent attention"
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


def _served(
    options: AttentionOptions,
    subject: SizedModel,
    titles: Sequence[str],
    layouts: Sequence[Layout],
    context: int,
) -> Served | None:
    """Plan the caches of full attention, whose window does not matter, and of layouts in the engine of options."""
    shape = subject.shape
    served = serve(options, shape, subject.num_sliding, options.kv_bytes, context=context, window=1)
    if served is None:
        return None
    engine = served.engine
    cache = served.cache
    plans = [engine.plan_layout(cache, [(None,) * number for number in shape.heads_per_layer])]
    for title, layout in zip(titles[1:], layouts, strict=True):
        advice = f"leave out {title}, or use another engine"
        engine.check_sinks(layout.sinks, advice)
        engine.check_windows(len(layout.windows), advice)
        plans.append(engine.plan_layout(replace(cache, sinks=layout.sinks), layout.head_windows))
    named = zip(titles, plans, strict=True)
    return replace(
        served, rows=tuple(({"name": name, "form": plan.form}, plan) for name, plan in named)
    )


def show(result: AttentionCosts) -> None:
    """Print KV bytes, FLOPs and times of full attention, of layouts and of a density."""
    shape = result.shape
    times = result.times
    served = result.served
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
    # Caches in an engine
    if served is not None:
        title = f"KV cache in {served.engine.title}: requests of {served.cache.context:,} tokens"
        grid = console.Table("attention", "served as", *served.titles, title=title)
        for about, plan in served.rows:
            grid.add_row(console.escape(about["name"]), about["form"], *served.cells(plan))
        console.out.print(grid)
        console.say(f"{served.settings}; {served.engine.title}: {served.engine.evidence}")


def document(result: AttentionCosts) -> dict[str, Any]:
    """Return KV bytes, FLOPs and times of full attention, of the layouts and of a density."""
    return {
        "name": result.name,
        "shape": result.shape,
        "context": result.context,
        "costs": result.costs,
        "times": None if result.times is None else result.times.source,
        **({} if result.served is None else result.served.document("layouts")),
    }
