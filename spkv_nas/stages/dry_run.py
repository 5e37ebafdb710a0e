"""Plan what the commands that train would train (``--dry-run``), from the same options; nothing is written."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from spkv_nas.artifacts import comparison, defaults
from spkv_nas.artifacts.proposal import distinct
from spkv_nas.base import console, distributed, errors, progress, units
from spkv_nas.cost.cache_cost import layout_share
from spkv_nas.probing.signals import DENSITY
from spkv_nas.stages import commands, forecast, lookup
from spkv_nas.stages.options import InPrecision, OnDevice, Trains, auto, probe, train, train_hybrid
from spkv_nas.training.hybrids import hybrid_variants
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.run_plan import FINISHED, Plan, PlannedRun, Planner
from spkv_nas.training.variants import Variant


def dry_run(options: Trains, reporter: progress.Reporter = progress.SILENT) -> commands.Result:
    """Return the plan of a training command, or its forecast, without training."""
    planned = plan_of(options, reporter)
    if isinstance(planned, Plan):
        return commands.Result(planned, show_runs, document_runs)
    return commands.Result(planned, forecast.show, forecast.document)


def plan_of(
    options: Trains, reporter: progress.Reporter = progress.SILENT
) -> Plan | forecast.Forecast:
    """Plan what a command would train; for ``probe`` without a recipe, estimate what its stages cost.

    Commands that are added by entry points have a function ``plan`` in the module that runs them.
    """
    planned: dict[type, Callable[[Any, progress.Reporter], Plan | forecast.Forecast]] = {
        train.TrainOptions: plan_train,
        auto.AutoOptions: forecast.plan_auto,
        probe.ProbeOptions: plan_probe,
        train_hybrid.TrainHybridOptions: plan_train_hybrid,
    }
    plan = planned.get(type(options))
    if plan is None:
        plan = import_module(commands.stage_module(type(options))).plan
    result: Plan | forecast.Forecast = plan(options, reporter)
    return result


def plan_train(options: train.TrainOptions, reporter: progress.Reporter = progress.SILENT) -> Plan:
    """Plan ``train``: the dense model and the SP-KV branch."""
    planner = planner_of(options, options.recipe, reporter)
    return planner.plan(reference_runs(planner))


def plan_probe(
    options: probe.ProbeOptions, reporter: progress.Reporter = progress.SILENT
) -> Plan | forecast.Forecast:
    """Plan ``probe RECIPE``: the models that its signal needs, and the probe. Without a recipe, see ``forecast``."""
    if options.recipe is None:
        return forecast.plan_probe(options, reporter)
    planner = planner_of(options, options.recipe, reporter)
    signal = probe.chosen_signal(options)
    # Count the passes over the held-out text
    data = planner.recipe.data
    tokens = planner.text.heldout(data)
    if options.max_tokens is not None:
        tokens = min(tokens, options.max_tokens)
    elif signal.computes_logits:
        tokens = min(tokens, defaults.SCORING_TOKENS)
    work = signal.work(planner.size.heads.grid, tokens, data.block_size)
    # Add the models that are trained first
    if signal.needs_gates:
        runs = reference_runs(planner)
        variant = Variant.sp_kv()
    else:
        runs = planner.dense()
        variant = Variant.full_attention()
    name = "probe" if signal.name == DENSITY.name else signal.name
    runs.append(planner.heldout_pass(name, variant, work.passes, work.tokens, work.effort))
    return planner.plan(runs)


def plan_train_hybrid(
    options: train_hybrid.TrainHybridOptions, reporter: progress.Reporter = progress.SILENT
) -> Plan:
    """Plan ``train-hybrid``: full attention, SP-KV and every layout."""
    table = lookup.chosen_table(options, reporter)
    proposal = lookup.find_proposal(options.folders, table.name, options.layouts)
    proposal.table(table)  # warns
    layouts = {name: proposal.layouts[name] for name in distinct(proposal.layouts)}
    planner = planner_of(options, lookup.chosen_recipe(options, table, "demo.yaml"), reporter)
    context = planner.recipe.data.block_size
    memory = [
        layout_share(layout, context, table.native_windows) for layout in proposal.layouts.values()
    ]
    proposal.warn_of_windows({comparison.SP_KV: planner.recipe.gates.window}, memory)
    variants = hybrid_variants(layouts, reference=options.reference)
    return planner.plan(hybrid_runs(planner, variants, options.seeds))


def reference_runs(planner: Planner) -> list[PlannedRun]:
    """Return the runs of the dense model, unless it is given, and of the SP-KV branch."""
    return [*planner.dense(), planner.branch(comparison.SP_KV, Variant.sp_kv())]


def hybrid_runs(
    planner: Planner, variants: Mapping[str, Variant], seeds: int = 1
) -> list[PlannedRun]:
    """Return the runs of a comparison of variants, and the pass that scores its layouts before training."""
    runs = planner.dense()
    for seed in range(planner.recipe.seed, planner.recipe.seed + seeds):
        for name, variant in variants.items():
            title = name if seeds == 1 else f"{name}, seed {seed}"
            runs.append(planner.branch(title, variant, seed))
    if any(run.state != FINISHED for run in runs):
        scored = 1 + sum(variant.layout is not None for variant in variants.values())
        dense = Variant.full_attention()
        runs.append(planner.heldout_pass("zero-shot scores (at most)", dense, scored))
    return runs


def planner_of(options: Trains, file: Path, reporter: progress.Reporter) -> Planner:
    """Make the planner of a recipe."""
    recipe = Recipe.read(file)
    if isinstance(options, InPrecision):
        recipe = recipe.with_precision(options.dtype)
    return Planner(
        recipe,
        file.parent,
        options.folders.run_dir(recipe.name),
        **planner_options(options, reporter),
    )


def planner_options(options: OnDevice, reporter: progress.Reporter) -> dict[str, Any]:
    """Return the device and message callback of a planner. Raises ``UserError`` under torchrun."""
    if distributed.num_processes() > 1:
        raise errors.UserError(
            "--dry-run does not run under torchrun: it times the steps of one process"
        )
    return {"device": options.device, "announce": reporter.announce}


def show_runs(plan: Plan) -> None:
    """Print the runs of a plan, their steps, tokens and time, and its remarks."""
    grid = console.Table(
        "", "steps", "tokens", "time", "", title=f"{console.escape(plan.name)}: planned work"
    )
    for run in plan.runs:
        steps = f"{run.steps:,}" if run.steps else "-"
        grid.add_row(
            console.escape(run.name),
            steps,
            f"{run.tokens:,}",
            units.format_seconds(run.seconds),
            run.state,
        )
    console.out.print(grid)
    tokens = sum(run.tokens for run in plan.runs)
    total = (
        f"{tokens:,} tokens, {units.format_seconds(plan.seconds)}"
        if tokens
        else "nothing left to do"
    )
    console.say("\n".join([f"total: {total}", *plan.remarks]))
    if not plan.fits:
        console.caution("the planned work does not fit in memory")


def document_runs(plan: Plan) -> dict[str, Any]:
    """Return the planned runs, their total time, and whether they fit in memory."""
    return {**vars(plan), "seconds": plan.seconds, "fits": plan.fits}
