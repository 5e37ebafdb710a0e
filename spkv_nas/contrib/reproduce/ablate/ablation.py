"""Ablation runs: train a list of overrides of one recipe from one dense checkpoint and tabulate the results.

The table follows the SP-KV paper's "Ablation Results" (appendix "Ablating design choices"): density, NLL, and their
relative change from the first row, the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.artifacts.comparison import DENSE
from spkv_nas.base.distributed import on_main
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.records import write_record
from spkv_nas.base.replace import replacing
from spkv_nas.base.tables import write_csv
from spkv_nas.base.version import environment
from spkv_nas.base.workspace import Workspace
from spkv_nas.contrib.reproduce.ablate.ablation_plan import AblationPlan
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.training.branches import Branch, BranchContext
from spkv_nas.training.corpus import join_processes
from spkv_nas.training.hybrids import zero_shot_scores
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


def ablate(
    path: Path,
    workspace: Workspace,
    *,
    device: str | None = None,
    dtype: str | None = None,
    reporter: Reporter = SILENT,
) -> tuple[str, pd.DataFrame]:
    """Train every row of an ablations file, and write ``reports/<name>/ablations.csv`` after each.

    All rows are validated before the first is trained. Finished rows are reused. Rows with ``trained: false`` are
    measured on the dense checkpoint as it is.

    Args:
        path: ablations file.
        workspace: workspace for runs and reports.
        device: device to train on; chosen automatically by default.
        dtype: precision that overrides that of the rows.
        reporter: receives a line for each run that starts, and its progress.

    Returns:
        (name of the ablations, table with columns ``COLUMNS``).

    Raises:
        UserError: a row is invalid; the message names the row and the key.
    """
    # Validate all rows
    workspace.check_writable()
    plan = AblationPlan.read(path, dtype)
    recipes, variants = plan.recipes, plan.variants
    for recipe in recipes.values():
        join_processes(recipe, device)

    # Train the rows, and write the table after each
    runs = workspace.run_dir(plan.name)
    finished: dict[str, Branch] = {}
    num_reused = 0
    for number, (name, recipe) in enumerate(recipes.items(), 1):
        context = BranchContext.prepare(recipe, plan.base, runs, device=device, reporter=reporter)
        recipes[name] = context.recipe
        if name in plan.untrained:
            finished[name] = _as_it_is(context, variants[name])
        else:
            if context.is_trained(variants[name]):
                num_reused += 1
            else:
                reporter.announce(f"{name} ({number} of {len(recipes)})")
            finished[name] = context.train(variants[name])
        rows = _table(finished, variants)
        on_main(partial(_write, workspace.report_dir(plan.name), rows, recipes))
    reporter.reused(num_reused, len(recipes) - len(plan.untrained), "runs")
    return plan.name, rows


def _as_it_is(context: BranchContext, variant: Variant) -> Branch:
    """Measure the dense checkpoint without training, with the variant's layout if it has one; call on all ranks."""
    layouts = {} if variant.layout is None else {variant.name: variant.layout}
    scores, *_ = zero_shot_scores(context, layouts)
    return Branch(context.dense, scores[variant.name if layouts else DENSE], density=None, steps=0)


def _table(finished: Mapping[str, Branch], variants: Mapping[str, Variant]) -> pd.DataFrame:
    """Tabulate the finished rows and their changes from the first."""
    rows: list[dict[str, Any]] = []
    # Compare every row with the first
    first = next(iter(finished.values()))
    for name, branch in finished.items():
        change = paired_difference(branch.nll, first.nll)
        percent = 100.0 * variants[name].density(branch.density)
        baseline = rows[0]["density_percent"] if rows else percent
        rows.append(
            {
                "name": name,
                "density_percent": percent,
                "delta_density_percent": 100.0 * (percent / baseline - 1.0) if baseline else float("nan"),
                "nll": branch.nll.mean,
                "delta_nll_percent": change.percent,
                "delta_nll_standard_error": change.standard_error,
                "steps": branch.steps,
            }
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _write(folder: Path, rows: pd.DataFrame, recipes: Mapping[str, Recipe]) -> None:
    """Write ``ablations.csv``, and ``ablations.yaml`` with the recipes and versions."""
    content = {
        "recipes": {name: recipe.model_dump(mode="json") for name, recipe in recipes.items()},
        "environment": environment(),
    }
    with replacing(folder) as new:
        write_csv(new / "ablations.csv", rows)
        write_record(new / "ablations.yaml", content)
