"""Results for people: what would be trained, what every stage takes, and a first recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.units import format_bytes, format_flops, format_seconds
from spkv_nas.cli import json_documents
from spkv_nas.cli.console import caution, out, say, say_where
from spkv_nas.cli.result import Result

if TYPE_CHECKING:
    from spkv_nas.base.progress import Reporter
    from spkv_nas.cost.stage_costs import Site
    from spkv_nas.stages.forecast import Forecast
    from spkv_nas.stages.init import FirstRecipe
    from spkv_nas.stages.options import Trains
    from spkv_nas.training.run_plan import Plan


def dry_run(options: Trains, reporter: Reporter) -> Result:
    """What the command of these options would train."""
    from spkv_nas.stages.plan import plan_of
    from spkv_nas.training.run_plan import Plan

    found = plan_of(options, reporter)
    return (
        Result(found, plan, json_documents.plan)
        if isinstance(found, Plan)
        else Result(found, forecast, json_documents.forecast)
    )


def plan(result: Plan) -> None:
    """The runs of a plan, what is left of each, and its remarks."""
    shown = Table("", "steps", "tokens", "time", "", title=f"{escape(result.name)}: what is to be done")
    for run in result.runs:
        steps = f"{run.steps:,}" if run.steps else "-"
        shown.add_row(escape(run.name), steps, f"{run.tokens:,}", format_seconds(run.seconds), run.state)
    out.print(shown)
    tokens = sum(run.tokens for run in result.runs)
    left = f"{tokens:,} tokens, {format_seconds(result.seconds)}" if tokens else "everything is finished"
    say(f"in all: {left}")
    for remark in result.remarks:
        say(remark)
    if not result.fits:
        caution("there is not enough memory for it")


def forecast(result: Forecast) -> None:
    """Memory, tokens, FLOPs and time of every stage, what to change where one does not fit, and what that rests on."""
    size, heads = result.size, result.size.heads
    out.print(
        f"[bold]{escape(result.name)}[/bold]: {size.num_parameters:,} parameters, {heads.num_layers} layers x "
        f"{heads.num_kv_heads} KV heads of size {heads.head_dim}; {result.num_predictor_parameters:,} in predictors"
    )
    fits = f"fits in\n{result.site.memory / 1e9:.3g} GB"
    shown = Table("", "memory", "tokens", "FLOPs", "time", fits, title=f"each stage on {_where(result.site)}")
    remedies: dict[str, list[str]] = {}
    for stage in result.stages:
        name = f"{escape(stage.name)}\n  [dim]{escape(stage.how)}[/dim]" if stage.how else escape(stage.name)
        tokens, flops = (f"{stage.tokens:,}", format_flops(stage.flops)) if stage.tokens else ("-", "-")
        time = "-" if stage.seconds is None else _time(stage.seconds, of_a_token=stage.tokens == 1)
        answer = {True: "yes", False: "no", None: "-"}[stage.fits]
        shown.add_row(name, format_bytes(round(stage.memory.total)), tokens, flops, time, answer)
        if stage.remedy:
            remedies.setdefault(stage.remedy, []).append(stage.name)
    out.print(shown)
    for remedy, names in remedies.items():
        caution(f"does not fit: {'; '.join(names)}\n  {remedy}")
    for remark in result.remarks:
        say(remark)


def _where(site: Site) -> str:
    return site.name if site.devices == 1 else f"{site.name}, training on {site.devices}"


def _time(seconds: float, *, of_a_token: bool = False) -> str:
    """Write a stage's time, of which FLOPs say nothing below a second, or a token's, nothing below a millisecond."""
    if of_a_token:
        return "< 1 ms" if seconds < 1e-3 else f"at least {1e3 * seconds:.3g} ms"
    return "< 1 s" if seconds < 1 else format_seconds(seconds)


def first_recipe(result: FirstRecipe) -> None:
    """What a recipe leads to, and where it is."""
    plan(result.plan)
    say_where("recipe", result.file)
