"""Train a list of overrides of one recipe from one dense checkpoint, and tabulate the results.

The table follows the SP-KV paper's "Ablation Results" (appendix "Ablating design choices"): density, NLL, and their
relative change from the first row, the baseline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from rich.markup import escape
from rich.table import Table

from spkv_nas.artifacts.comparison import DENSE
from spkv_nas.base import console, distributed, progress, records, replace, tables, version
from spkv_nas.contrib.reproduce.ablate.ablation_plan import AblationPlan
from spkv_nas.contrib.reproduce.ablate.options import EMBEDDED_FILE, AblateOptions
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.stages import commands, dry_run, printing
from spkv_nas.training import branches, corpus, hybrids, run_plan
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant

COLUMNS = (
    "name",
    "density_percent",
    "delta_density_percent",
    "nll",
    "delta_nll_percent",
    "delta_nll_standard_error",
    "steps",
)


@dataclass(frozen=True)
class AblationResult:
    """Name of the ablations file, the table with columns ``COLUMNS``, and its folder."""

    name: str
    rows: pd.DataFrame
    folder: Path


def run(options: AblateOptions, reporter: progress.Reporter) -> commands.Result:
    """Train every row of an ablations file, and write ``reports/<name>/ablations.csv`` after each.

    All rows are validated before the first is trained. Finished rows are reused. Rows with ``trained: false`` are
    measured on the dense checkpoint as it is.
    """
    # Validate all rows
    workspace = options.folders
    device = options.device
    plan = AblationPlan.read(options.file or EMBEDDED_FILE, options.dtype)
    recipes = plan.recipes
    variants = plan.variants
    for recipe in recipes.values():
        corpus.join_processes(recipe, device)
    # Train the rows, and write the table after each
    runs = workspace.run_dir(plan.name)
    folder = workspace.report_dir(plan.name)
    finished: dict[str, branches.Branch] = {}
    num_reused = 0
    for number, (name, recipe) in enumerate(recipes.items(), 1):
        context = branches.BranchContext.prepare(
            recipe, plan.base, runs, device=device, reporter=reporter
        )
        recipes[name] = context.recipe
        if name in plan.untrained:
            # Measure the dense checkpoint as it is, with the row's layout if it has one
            variant = variants[name]
            layouts = {} if variant.layout is None else {variant.name: variant.layout}
            scores, *_ = hybrids.zero_shot_scores(context, layouts)
            nll = scores[variant.name if layouts else DENSE]
            finished[name] = branches.Branch(context.dense, nll, density=None, steps=0)
        else:
            if context.is_trained(variants[name]):
                num_reused += 1
            else:
                reporter.announce(f"{name} ({number} of {len(recipes)})")
            finished[name] = context.train(variants[name])
        rows = _table(finished, variants)
        distributed.on_main(partial(_write, folder, rows, recipes))
    reporter.reused(num_reused, len(recipes) - len(plan.untrained), "runs")
    return commands.Result(AblationResult(plan.name, rows, folder), show)


def _table(
    finished: Mapping[str, branches.Branch], variants: Mapping[str, Variant]
) -> pd.DataFrame:
    """Tabulate the finished rows and their changes from the first."""
    rows: list[tuple[Any, ...]] = []
    first_name, first = next(iter(finished.items()))
    baseline = 100.0 * variants[first_name].density(first.density)
    for name, branch in finished.items():
        difference = paired_difference(branch.nll, first.nll)
        percent = 100.0 * variants[name].density(branch.density)
        density_change = 100.0 * (percent / baseline - 1.0) if baseline else float("nan")
        nll = (branch.nll.mean, difference.percent, difference.standard_error)
        rows.append((name, percent, density_change, *nll, branch.steps))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _write(folder: Path, rows: pd.DataFrame, recipes: Mapping[str, Recipe]) -> None:
    """Write ``ablations.csv``, and ``ablations.yaml`` with the recipes and versions."""
    content = {
        "recipes": {name: recipe.model_dump(mode="json") for name, recipe in recipes.items()},
        "environment": version.environment(),
    }
    with replace.replacing(folder) as new:
        tables.write_csv(new / "ablations.csv", rows)
        records.write_record(new / "ablations.yaml", content)


def show(result: AblationResult) -> None:
    """Print density and NLL of each row, and their change from the first."""
    title = f"{escape(result.name)}: Δ relative to the first row"
    grid = Table("", "density %", "Δ density %", "NLL", "ΔNLL %", title=title)
    for row in result.rows.itertuples():
        nll_change = (
            printing.change(row.delta_nll_percent, row.delta_nll_standard_error)
            if row.Index
            else "-"
        )
        density_change = f"{row.delta_density_percent:+.1f}" if row.Index else "-"
        grid.add_row(
            escape(row.name),
            f"{row.density_percent:.1f}",
            density_change,
            f"{row.nll:.4f}",
            nll_change,
        )
    console.out.print(grid)
    console.print_path("table", result.folder / "ablations.csv")


def plan(options: AblateOptions, reporter: progress.Reporter) -> run_plan.Plan:
    """Plan every row of the ablations file."""
    ablations = AblationPlan.read(options.file or EMBEDDED_FILE, options.dtype)
    runs = options.folders.run_dir(ablations.name)
    first = next(iter(ablations.recipes.values()))
    planner = run_plan.Planner(
        first, ablations.base, runs, **dry_run.planner_options(options, reporter)
    )
    plans = []
    trained: set[Path] = set()
    for name, recipe in ablations.recipes.items():
        planner = planner.with_recipe(recipe)
        # A dense model that rows share counts once
        dense = [] if planner.dense_path in trained else planner.dense()
        trained.add(planner.dense_path)
        measure = planner.heldout_pass if name in ablations.untrained else planner.branch
        plans.append(planner.plan([*dense, measure(name, ablations.variants[name])]))
    return run_plan.merge_plans(ablations.name, plans)
