"""Train the rows of an ablations file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.contrib.reproduce.ablate import ablation
from spkv_nas.contrib.reproduce.ablate.ablation_plan import AblationPlan
from spkv_nas.contrib.reproduce.ablate.options import EMBEDDED_FILE, AblateOptions
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.dry_run import planner_options
from spkv_nas.stages.printing import change
from spkv_nas.stages.result import Result
from spkv_nas.training.run_plan import Plan, Planner, merge_plans


@dataclass(frozen=True)
class AblationResult:
    """Name of the ablations file, the table of ``ablation``, and its folder."""

    name: str
    rows: pd.DataFrame
    folder: Path


def ablate(options: AblateOptions, reporter: Reporter = SILENT) -> AblationResult:
    """Train the rows of an ablations file, by default the embedded one, and write a table to ``reports/<name>/``."""
    quiet_transformers(reporter)
    file, workspace = options.file or EMBEDDED_FILE, options.folders
    name, rows = ablation.ablate(file, workspace, device=options.device, dtype=options.dtype, reporter=reporter)
    return AblationResult(name, rows, workspace.report_dir(name))


def show(result: AblationResult) -> None:
    """Print density and NLL of each row, and their change from the first."""
    title = f"{escape(result.name)}: Δ relative to the first row"
    grid = Table("", "density %", "Δ density %", "NLL", "ΔNLL %", title=title)
    for row in result.rows.itertuples():
        nll_change = change(row.delta_nll_percent, row.delta_nll_standard_error) if row.Index else "-"
        density_change = f"{row.delta_density_percent:+.1f}" if row.Index else "-"
        grid.add_row(escape(row.name), f"{row.density_percent:.1f}", density_change, f"{row.nll:.4f}", nll_change)
    out.print(grid)
    print_path("table", result.folder / "ablations.csv")


def plan(options: AblateOptions, reporter: Reporter) -> Plan:
    """Plan every row of the ablations file."""
    ablations = AblationPlan.read(options.file or EMBEDDED_FILE, options.dtype)
    runs, first = options.folders.run_dir(ablations.name), next(iter(ablations.recipes.values()))
    planner, plans = Planner(first, ablations.base, runs, **planner_options(options, reporter)), []
    trained: set[Path] = set()
    for name, recipe in ablations.recipes.items():
        planner = planner.with_recipe(recipe)
        dense = [] if planner.dense_path in trained else planner.dense()  # a dense model that rows share counts once
        trained.add(planner.dense_path)
        run = planner.heldout_pass if name in ablations.untrained else planner.branch
        plans.append(planner.plan([*dense, run(name, ablations.variants[name])]))
    return merge_plans(ablations.name, plans)


def run(options: AblateOptions, reporter: Reporter) -> Result:
    """Run the command."""
    return Result(ablate(options, reporter), show)
