"""Retrain layouts from one dense checkpoint and compare them."""

import math

from spkv_nas.artifacts.comparison import DENSE, FULL_ATTENTION, SP_KV
from spkv_nas.base.console import Table, escape, out, say
from spkv_nas.base.progress import Reporter
from spkv_nas.cost.cache_cost import layout_share
from spkv_nas.evaluation.ranking import format_rank_correlation
from spkv_nas.stages import commands, lookup, printing
from spkv_nas.stages.options.report import ReportOptions
from spkv_nas.stages.options.train_hybrid import TrainHybridOptions
from spkv_nas.training import hybrids
from spkv_nas.training.recipe import Recipe


def run(options: TrainHybridOptions, reporter: Reporter) -> commands.Result:
    """Retrain layouts, by default all of the workspace's, and write their comparison to ``reports/<name>/``."""
    workspace = options.folders
    # Read probe, layouts and recipe
    table = lookup.chosen_table(options, reporter)
    proposal = lookup.find_proposal(workspace, table.name, options.layouts)
    recipe_file = lookup.chosen_recipe(options, table, "demo.yaml")
    recipe = Recipe.read(recipe_file).with_precision(options.dtype)
    # Warn before hours of work
    reporter.caution(table.missed_price)
    memory = [
        layout_share(layout, recipe.data.block_size, table.native_windows)
        for layout in proposal.layouts.values()
    ]
    if options.reference:
        gates = {f"{SP_KV} (recipe {recipe_file})": recipe.gates.window}
        proposal.warn_of_windows(gates, memory)
        for line in recipe.warnings():
            reporter.caution(f"warning: {line}")
    else:
        proposal.warn_of_windows(memory=memory)
    # Retrain and compare
    result = hybrids.train_by_recipe(
        recipe,
        proposal.layouts,
        proposal.table(table),
        workspace,
        base=recipe_file.parent,
        num_seeds=options.seeds,
        reference=options.reference,
        device=options.device,
        reporter=reporter,
    )
    # Suggest the report on the layouts of a probe
    following = ReportOptions(probe=result.folder.name, workspace=options.workspace)
    is_shown = not result.alarm and following.probe in workspace.probes()
    return commands.Result(
        result, show, document, next=[commands.Suggestion.of(following)] if is_shown else ()
    )


def show(result: hybrids.Comparison) -> None:
    """Print retrained layouts, the rank correlations of cheaper measures, and the checkpoints."""
    printing.show_alarm(result.alarm)
    baselines = {DENSE: "dense, as it is", FULL_ATTENTION: "control: full attention"}
    # Table of layouts
    columns = (
        "density\n%",
        "coverage\n%",
        "zero-shot\nΔNLL %",
        "\nNLL",
        "\nΔNLL %",
        "relative to\ncontrol %",
    )
    title = "retrained from one dense checkpoint; ΔNLL is relative to that checkpoint as it is"
    grid = Table("", *columns, title=title)
    for row in result.rows.itertuples():
        grid.add_row(
            baselines.get(row.strategy, escape(row.strategy)),
            f"{row.density_percent:.1f}",
            "-" if math.isnan(row.coverage_percent) else f"{row.coverage_percent:.2f}",
            printing.change(row.zero_shot_delta_percent),
            f"{row.nll:.4f}",
            printing.change(row.delta_nll_percent, row.delta_nll_standard_error),
            printing.change(row.delta_control_percent, row.delta_control_standard_error),
        )
    out.print(grid)
    # Notes and errors
    for row in result.rows[result.rows["note"] != ""].itertuples():
        say(f"{row.strategy}: {row.note}")
    printing.about_errors(result.heldout.num_documents, result.heldout.effective_documents)
    # Rank correlations
    for measure, rank in result.correlations.items():
        if rank is not None:
            perfect = "-1" if measure == "coverage" else "+1"
            out.print(
                f"rank correlation of {measure} and ΔNLL: "
                f"{format_rank_correlation(rank)}; perfect: {perfect}"
            )
    # Checkpoints
    out.print("checkpoints (for export, evaluate and generate):")
    for model in result.models:
        out.print(
            f"  {escape(model.strategy)}, seed {model.seed}: {escape(str(model.checkpoint))}",
            soft_wrap=True,
        )


def document(result: hybrids.Comparison) -> dict[str, object]:
    """Return the retrained layouts, the rank correlations of cheaper measures, and the checkpoints."""
    return {
        "layouts": result.rows,
        "alarm": result.alarm,
        "num_documents": result.heldout.num_documents,
        "effective_documents": result.heldout.effective_documents,
        "rank_correlation": result.correlations,
        "checkpoints": result.models,
        "folder": result.folder,
    }
