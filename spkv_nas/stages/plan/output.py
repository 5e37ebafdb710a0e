"""Print what every stage costs, and convert it to a JSON document."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import caution, out, say
from spkv_nas.base.units import format_bytes, format_flops, format_seconds

if TYPE_CHECKING:
    from spkv_nas.cost.stage_costs import Site
    from spkv_nas.stages.forecast import Forecast
    from spkv_nas.stages.plan.served import ServedBudgets
    from spkv_nas.stages.plan.stage import PlanResult


_SHOWN_STEPS = 16  # approximate number of budgets printed


def show(result: PlanResult) -> None:
    """Print the cost of every stage, and of budgets in a serving engine."""
    forecast(result.forecast)
    if result.served is not None:
        _served(result.served)


def _served(result: ServedBudgets) -> None:
    """Print the memory of about ``_SHOWN_STEPS`` budgets: those with smaller ones to skip, and others evenly."""
    engine, cache, num_kv_heads = result.engine, result.cache, result.cache.grid[1]
    title = f"KV cache in {engine.title}: requests of {cache.context:,} tokens, window {cache.window}, {cache.dtype}"
    grid = Table("global layers", *result.titles, "instead of", title=title)
    stride = -(-len(result.steps) // _SHOWN_STEPS)
    for index, step in enumerate(result.steps):
        if index % stride and not step.instead_of and step is not result.steps[-1]:
            continue
        skipped = ", ".join(str(heads // num_kv_heads) for heads in step.instead_of)
        grid.add_row(str(step.num_global // num_kv_heads), *result.cells(step.plan), skipped)
    out.print(grid)
    say(f"instead of: numbers of global layers that take as much memory or more; {engine.title}: {engine.evidence}")
    say(f"{result.in_flight}; {engine.note}")


def plan_document(result: PlanResult) -> dict[str, Any]:
    """Return the cost of every stage, and with an engine every budget worth choosing."""
    served = result.served
    if served is None:
        return document(result.forecast)
    budgets = [
        {"num_global": step.num_global, "instead_of": step.instead_of, **served.sizes(step.plan)}
        for step in served.steps
    ]
    return {**document(result.forecast), **served.document("budgets", budgets)}


def forecast(result: Forecast) -> None:
    """Print memory, tokens, FLOPs and time of every stage, and what to change where one does not fit."""
    # Model
    size, heads = result.size, result.size.heads
    out.print(
        f"[bold]{escape(result.name)}[/bold]: {size.num_parameters:,} parameters, {heads.num_layers} layers x "
        f"{heads.num_kv_heads} KV heads of size {heads.head_dim}; {result.num_predictor_parameters:,} of predictors"
    )
    # Table of stages
    fits_title = f"fits in\n{result.site.memory / 1e9:.3g} GB"
    grid = Table(
        "", "memory", "tokens", "FLOPs", "time", fits_title, title=f"cost of each stage on {_hardware(result.site)}"
    )
    remedies: dict[str, list[str]] = {}
    for stage in result.stages:
        name = f"{escape(stage.name)}\n  [dim]{escape(stage.batching)}[/dim]" if stage.batching else escape(stage.name)
        tokens, flops = (f"{stage.tokens:,}", format_flops(stage.flops)) if stage.tokens else ("-", "-")
        time = "-" if stage.seconds is None else _time(stage.seconds, of_a_token=stage.tokens == 1)
        answer = {True: "yes", False: "no", None: "-"}[stage.fits]
        grid.add_row(name, format_bytes(round(stage.memory.total)), tokens, flops, time, answer)
        if stage.remedy:
            remedies.setdefault(stage.remedy, []).append(stage.name)
    out.print(grid)
    # Remedies and remarks
    for remedy, names in remedies.items():
        caution(f"does not fit: {'; '.join(names)}\n  {remedy}")
    for remark in result.remarks:
        say(remark)


def _hardware(site: Site) -> str:
    """Return the hardware's name and, for several devices, their number."""
    return site.name if site.devices == 1 else f"{site.name}, training on {site.devices}"


def _time(seconds: float, *, of_a_token: bool = False) -> str:
    """Format a stage's time, or that of one token.

    A forecast from FLOPs means nothing below a second for a stage, or below a millisecond for a token.
    """
    if of_a_token:
        return "< 1 ms" if seconds < 1e-3 else f"at least {1e3 * seconds:.3g} ms"
    return "< 1 s" if seconds < 1 else format_seconds(seconds)


def document(result: Forecast) -> dict[str, Any]:
    """Return memory, tokens, FLOPs and time of every stage."""
    return {
        **{field.name: getattr(result, field.name) for field in fields(result)},
        "stages": [
            {
                **{field.name: getattr(stage, field.name) for field in fields(stage)},
                "bytes": stage.memory.total,
                "fits": stage.fits,
            }
            for stage in result.stages
        ],
    }
