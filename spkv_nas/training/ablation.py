"""Ablations: a list of overrides on one recipe, trained from one dense checkpoint, as the paper's table shows them.

SP-KV paper, table "Ablation Results" (appendix "Ablating design choices"): density, NLL, and their relative change from
a baseline, which is the first row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.base.distributed import on_main
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.records import write_record
from spkv_nas.base.replace import replacing
from spkv_nas.base.tables import write_csv
from spkv_nas.base.version import environment
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.training.ablation_plan import AblationPlan
from spkv_nas.training.branches import Branch, BranchContext
from spkv_nas.training.corpus import join_processes
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
    """Train every row of a file of ablations; write ``reports/<name>/ablations.csv`` after each.

    All rows are checked before the first is trained. A finished row is not trained again.

    Args:
        dtype: precision in place of the rows' own.
        reporter: told what starts, one line each, and shows how far it is.

    Returns:
        The name, and the table (columns ``COLUMNS``).

    Raises:
        UserError: naming the row and the key that is wrong.
    """
    workspace.check_writable()
    plan = AblationPlan.read(path, dtype)
    recipes, variants = plan.recipes, plan.variants
    for recipe in recipes.values():
        join_processes(recipe, device)
    runs = workspace.run_dir(plan.name)
    finished: dict[str, Branch] = {}
    num_reused = 0
    for number, (name, recipe) in enumerate(recipes.items(), 1):
        trunk = BranchContext.prepare(recipe, plan.base, runs, device=device, reporter=reporter)
        if trunk.is_trained(variants[name]):
            num_reused += 1
        else:
            reporter.announce(f"{name} ({number} of {len(recipes)})")
        finished[name], recipes[name] = trunk.train(variants[name]), trunk.recipe
        rows = _table(finished, variants)
        on_main(partial(_write, workspace.report_dir(plan.name), rows, recipes))
    reporter.reused(num_reused, len(recipes), "runs")
    return plan.name, rows


def _table(finished: Mapping[str, Branch], variants: Mapping[str, Variant]) -> pd.DataFrame:
    """The rows that have finished, against the first."""
    rows: list[dict[str, Any]] = []
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
    content = {
        "recipes": {name: recipe.model_dump(mode="json") for name, recipe in recipes.items()},
        "environment": environment(),
    }
    with replacing(folder) as new:
        write_csv(new / "ablations.csv", rows)
        write_record(new / "ablations.yaml", content)
