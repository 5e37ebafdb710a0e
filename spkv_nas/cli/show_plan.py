"""Results for people: what would be trained, and a first recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.units import format_seconds
from spkv_nas.cli import documents
from spkv_nas.cli.console import caution, out, say, say_where
from spkv_nas.cli.result import Result

if TYPE_CHECKING:
    from spkv_nas.base.progress import Reporter
    from spkv_nas.stages.init import FirstRecipe
    from spkv_nas.stages.options import Trains
    from spkv_nas.training.plan import Plan


def dry_run(options: Trains, reporter: Reporter) -> Result:
    """What the command of these options would train."""
    from spkv_nas.stages.plan import plan_of

    return Result(plan_of(options, reporter), plan, documents.plan)


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


def first_recipe(result: FirstRecipe) -> None:
    """What a recipe leads to, and where it is."""
    plan(result.plan)
    say_where("recipe", result.file)
