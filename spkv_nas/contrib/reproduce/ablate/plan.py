"""Plan the runs of an ablations file."""

from __future__ import annotations

from pathlib import Path

from spkv_nas.base.progress import Reporter
from spkv_nas.contrib.reproduce.ablate.ablation_plan import AblationPlan
from spkv_nas.contrib.reproduce.ablate.options import EMBEDDED_FILE, AblateOptions
from spkv_nas.stages.dry_run import planner_options
from spkv_nas.training.run_plan import Plan, Planner, merge_plans


def plan_ablations(options: AblateOptions, reporter: Reporter) -> Plan:
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
