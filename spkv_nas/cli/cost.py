"""The commands ``cost`` and ``calibrate``: what attention costs, and the times that this machine needs for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from spkv_nas.artifacts.shape import Shape
    from spkv_nas.cost.calibration import Calibration
    from spkv_nas.cost.formulas import Cost
    from spkv_nas.cost.times import AttentionTimes

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

PresetArgument = Annotated[
    str | None,
    typer.Argument(
        help="Level of the ladder: level-0 to level-10, level-13, llama-3-8b, micro-0 to micro-4.",
        metavar="LEVEL", show_default=False,
    ),
]  # fmt: skip
ModelOption = Annotated[
    str | None,
    typer.Option(help="Model folder, id or config file; embedded:reference by default.", show_default=False),
]
WorkspaceOption = Annotated[
    Path, typer.Option("--workspace", "-w", help="Folder with reports/.", show_default="here")
]  # fmt: skip


def cost(
    preset: PresetArgument = None,
    model: ModelOption = None,
    layout: Annotated[list[Path] | None, typer.Option(help="Layout (YAML); repeat for several.")] = None,
    density: Annotated[
        float | None, typer.Option(help="Share of keys that SP-KV keeps beyond the window.", show_default=False)
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens in the cache; k is 1,024.", metavar="N|Nk")] = "128k",
    window: Annotated[int, typer.Option(min=1, help="Recent keys that SP-KV keeps in any case.")] = 128,
    element_size: Annotated[int, typer.Option(min=1, help="Bytes per number in the cache (2: bfloat16).")] = 2,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Take times from this calibration of the workspace; the level's or model's own by default, if there "
            "is one that fits.",
            metavar="NAME", show_default=False,
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Take times from the roofline of h200, h100 or a100.", show_default="h200, uncalibrated"),
    ] = None,
    figure: Annotated[
        bool, typer.Option("--figure", help="Also draw FLOPs against model size over the ladder (density 0.2).")
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the figure's folder in reports/.")] = "paper",
    workspace: WorkspaceOption = Path(),
) -> None:  # fmt: skip
    """Print KV bytes, forward FLOPs and times per token of a level or model: full attention, layouts, a density.

    FLOPs are Kaplan's, 2 N + 2 L d_attn keys: the mean over a causal sequence as long as the context. Times are those
    of the attention of all layers: measured by spkv-nas calibrate, or the least that a GPU can take (its roofline).
    """
    from spkv_nas.base.workspace import Workspace
    from spkv_nas.stages import cost as cost_stages

    place = Workspace(workspace)
    _show_cost(
        *cost_stages.cost_stage(
            place, preset, model=model, layouts=layout, density=density, context=context, window=window,
            element_size=element_size, calibration=calibration, hardware=hardware,
            announce=lambda line: err.print(f"[yellow]{escape(line)}[/yellow]"),
        )
    )  # fmt: skip
    if figure:
        path = cost_stages.flops_figure_stage(place, context, 0.2 if density is None else density, name=name)
        out.print(f"figure: [bold]{escape(str(path))}[/bold]")


def calibrate(
    preset: PresetArgument = None,
    model: ModelOption = None,
    context: Annotated[
        str, typer.Option(help="Longest context, which with 1k, 4k, 16k, ... is measured; k is 1,024.", metavar="N|Nk")
    ] = "32k",
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    window: Annotated[int, typer.Option(min=1, help="Window of local heads.")] = 128,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="float32 on CPU, else bfloat16")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; CUDA if there is one.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the result; the level's or model's by default.", show_default=False)
    ] = None,
    workspace: WorkspaceOption = Path(),
) -> None:  # fmt: skip
    """Measure on this machine what attention takes, with 0 to all KV heads of a layer global.

    Writes reports/NAME/calibration.csv and .yaml, from which spkv-nas cost takes its times. Decoding is measured up to
    --context, prefill only up to the longest of the contexts at which one call takes at most some 4 seconds.
    """
    from spkv_nas.base.workspace import Workspace
    from spkv_nas.stages import cost as cost_stages

    place = Workspace(workspace)
    name, found = cost_stages.calibrate_stage(
        place, preset, model=model, context=context, batch=batch, window=window, dtype=dtype, device=device, name=name
    )
    _show_calibration(name, found)
    out.print(f"times: [bold]{escape(str(place.report_dir(name) / 'calibration.csv'))}[/bold]", soft_wrap=True)


def _show_cost(name: str, shape: Shape, context: int, costs: list[Cost], times: AttentionTimes) -> None:
    out.print(
        f"[bold]{escape(name)}[/bold]: {shape.num_parameters / 1e6:,.4g} M parameters without embeddings, "
        f"{shape.num_layers} layers x {shape.num_kv_heads} KV heads of size {shape.head_dim}; {context:,} tokens"
    )
    shown = Table(
        "attention", "KV bytes\nper token", "KV cache\nMiB", "attention\nGFLOPs", "total\nGFLOPs", "decode\nµs",
        "prefill\nµs", title="FLOPs and times are per token",
    )  # fmt: skip
    for row in costs:
        shown.add_row(
            escape(row.name),
            f"{row.kv_bytes_per_token:,.0f}",
            f"{row.kv_cache_bytes / 2**20:,.2f}",
            f"{row.attention_flops / 1e9:,.4g}",
            f"{row.total_flops / 1e9:,.4g}",
            _microseconds(row.decode_seconds),
            _microseconds(row.prefill_seconds),
        )
    out.print(shown)
    out.print(f"times: attention of all layers, {escape(times.source)}")
    if costs[0].prefill_seconds is None:
        out.print(f"-: prefill was not measured at {context:,} tokens")


def _show_calibration(name: str, found: Calibration) -> None:
    case = found.case
    counts = case.global_counts
    shown = Table(
        "", "tokens", *(str(g) for g in counts),
        title=f"{escape(name)}: µs per token and layer\nby number of global heads",
    )  # fmt: skip
    seconds = {(row.phase, row.context, row.num_global): row.seconds_per_token for row in found.timings}
    for phase, context in dict.fromkeys((row.phase, row.context) for row in found.timings):
        shown.add_row(phase, f"{context:,}", *(_microseconds(seconds[phase, context, g]) for g in counts))
    out.print(shown)
    out.print(f"{case.title}, window {case.window}, {escape(found.source)}")
    if (last := found.contexts("prefill")[-1]) < found.contexts("decode")[-1]:
        out.print(f"prefill: not measured beyond {last:,} tokens, where a call would take too long")
    if found.is_disturbed:
        err.print("[yellow]longer contexts were decoded faster: calibrate again when the machine is idle[/yellow]")


def _microseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    value = 1e6 * seconds
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
