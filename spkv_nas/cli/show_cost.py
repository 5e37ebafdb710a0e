"""Print results for people: costs and times of attention, and the scaling law."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import caution, out, say_where

if TYPE_CHECKING:
    from spkv_nas.stages.cost import CalibrationResult, CostResult
    from spkv_nas.stages.scaling import ScalingResult
    from spkv_nas.training.step_timing import StepTiming


def cost(result: CostResult) -> None:
    """Print KV bytes, FLOPs and times of full attention, of layouts and of a density."""
    shape = result.shape
    out.print(
        f"[bold]{escape(result.name)}[/bold]: {shape.num_parameters / 1e6:,.4g} M parameters without embeddings, "
        f"{shape.num_layers} layers x {shape.num_kv_heads} KV heads of size {shape.head_dim}; "
        f"{result.context:,} tokens"
    )
    # Table of costs
    grid = Table(
        "attention",
        "KV bytes\nper token",
        "KV cache\nMiB",
        "attention\nGFLOPs",
        "total\nGFLOPs",
        "decode\nµs",
        "prefill\nµs",
        title="FLOPs and times are per token",
    )
    for row in result.costs:
        grid.add_row(
            escape(row.name),
            f"{row.kv_bytes_per_token:,.0f}",
            f"{row.kv_cache_bytes / 2**20:,.2f}",
            f"{row.attention_flops / 1e9:,.4g}",
            f"{row.total_flops / 1e9:,.4g}",
            _microseconds(row.decode_seconds),
            _microseconds(row.prefill_seconds),
        )
    out.print(grid)
    # Where the times come from
    out.print(f"times: attention of all layers, {escape(result.times.source)}")
    if result.costs[0].prefill_seconds is None:
        out.print(f"-: prefill was not measured at {result.context:,} tokens")
    if result.figure is not None:
        say_where("figure", result.figure)


def calibration(result: CalibrationResult) -> None:
    """Print measured times by number of global heads."""
    measured = result.calibration
    case = measured.case
    counts = case.global_counts
    grid = Table(
        "",
        "tokens",
        *(str(count) for count in counts),
        title=f"{escape(result.name)}: µs per token and layer\nby number of global heads",
    )
    seconds = {(row.phase, row.context, row.num_global): row.seconds_per_token for row in measured.timings}
    for phase, context in dict.fromkeys((row.phase, row.context) for row in measured.timings):
        grid.add_row(phase, f"{context:,}", *(_microseconds(seconds[phase, context, count]) for count in counts))
    out.print(grid)
    out.print(f"{case.title}, window {case.window}, {escape(measured.source)}")
    if (last := measured.contexts("prefill")[-1]) < measured.contexts("decode")[-1]:
        out.print(f"prefill: not measured beyond {last:,} tokens, where a call would take too long")
    if measured.is_disturbed:
        caution("longer contexts were decoded faster: calibrate again when the machine is idle")
    say_where("times", result.folder / "calibration.csv")


def training_steps(timings: list[StepTiming]) -> None:
    """Print times of whole training steps."""
    has_bars = any(row.bar is not None for row in timings)
    columns = ("", "ms", "tokens/s", "of full attention", *(["must"] if has_bars else []))
    grid = Table(*columns, title="a training step")
    for row in timings:
        cells = [row.case, f"{1e3 * row.seconds:,.1f}", f"{row.tokens_per_second:,.0f}", f"{row.ratio:.2f}"]
        limit = "" if row.bar is None else f"{row.bar:.2f}"
        grid.add_row(*cells, *([limit] if has_bars else []))
    out.print(grid)


def scaling(result: ScalingResult) -> None:
    """Print the fitted scaling laws and their predictions."""
    for law in result.laws:
        _law(result.name, law)
    say_where("scaling", result.figure or result.folder / "scaling.yaml")


def _law(name: str, law: dict[str, Any]) -> None:
    """Print one scaling law: parameters, fit, and predictions of the last and the held-out runs."""
    # Fitted parameters
    title = f"{name}, {law['variant']}" if law["variant"] else name
    grid = Table("", "value", f"{law['confidence']:.0%} interval", title=escape(f"{title}: {law['law']}"))
    for parameter, (value, low, high) in law["parameters"].items():
        grid.add_row(parameter, f"{value:.4g}", f"{low:.4g} .. {high:.4g}")
    out.print(grid)
    out.print(
        f"R² {law['r_squared']:.5f} over {law['num_runs']} runs; a run's standard deviation {law['residual']:.4f}"
    )
    # Prediction of the last run from the others
    last = law["leave_last_out"]
    if last["predicted"] is not None:
        out.print(
            f"last run from the others: {escape(last['name'])} predicted {last['predicted']:.4f}, "
            f"is {last['nll']:.4f} ({last['error_percent']:+.2f} %)"
        )
    # Predictions of held-out runs
    for run in law["runs"]:
        if run["held_out"]:
            out.print(
                f"held out: {escape(run['name'])} predicted {run['predicted']:.4f} ({run['low']:.4f} .. "
                f"{run['high']:.4f}), is {run['nll']:.4f} ({run['error_percent']:+.2f} %)"
            )


def _microseconds(seconds: float | None) -> str:
    """Format seconds as microseconds; a dash for None."""
    if seconds is None:
        return "-"
    value = 1e6 * seconds
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
