"""Ablations: a list of overrides on one recipe, trained from one dense checkpoint, as the paper's table shows them.

SP-KV paper, table "Ablation Results" (appendix "Ablating design choices"): density, NLL, and their relative change from
a baseline, which is the first row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, field_validator

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV, check_layout_names
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.distributed import on_main
from spkv_nas.base.files import read_yaml
from spkv_nas.base.names import MOST_CHARACTERS
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.records import write_record
from spkv_nas.base.replace import replacing
from spkv_nas.base.schema import merged, validate
from spkv_nas.base.tables import write_csv
from spkv_nas.base.version import environment
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.training.branches import Branch, Trunk
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


class Row(BaseModel):
    """One row: an SP-KV branch unless it says otherwise; all other keys are sections of a recipe."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    variant: str = Field(SP_KV, description="sp-kv or full-attention")
    layout: str | None = Field(None, description="a layout file, from the folder of the ablations: a hybrid")

    @field_validator("variant")
    @classmethod
    def _is_known(cls, variant: str) -> str:
        if variant not in (SP_KV, FULL_ATTENTION):
            raise ValueError(f"should be '{SP_KV}' or '{FULL_ATTENTION}'")
        return variant

    def read_variant(self, folder: Path) -> Variant:
        """The variant that the row asks for; a layout's file is looked up from ``folder``. Raises ``UserError``."""
        if self.layout is not None:
            layout = Layout.read(folder / self.layout)
            check_layout_names([layout.strategy])
            return Variant.hybrid(layout)
        return Variant.full_attention() if self.variant == FULL_ATTENTION else Variant.sp_kv()


class Ablations(BaseModel):
    """The file of ``spkv-nas ablate``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=MOST_CHARACTERS)
    recipe: dict[str, Any] | str = Field(description="the base recipe, or its file from the folder of the ablations")
    rows: dict[str, Row] = Field(min_length=1, description="by name; the first is the baseline")


@dataclass(frozen=True)
class AblationPlan:
    """A checked file of ablations: its name, the folder that relative paths start from, and by row what is trained."""

    name: str
    base: Path
    recipes: dict[str, Recipe]
    variants: dict[str, Variant]

    @classmethod
    def read(cls, path: Path, dtype: str | None = None) -> AblationPlan:
        """Read a file; ``dtype`` is a precision in place of the rows' own.

        Raises:
            UserError: naming the row and the key that is wrong.
        """
        file = validate(Ablations, read_yaml(path, "ablations"), f"ablations {path}")
        base = path.parent
        if isinstance(file.recipe, str):
            base = (base / file.recipe).parent
            common = read_yaml(path.parent / file.recipe, "recipe")
        else:
            common = file.recipe
        recipes = {
            name: Recipe.parse(
                merged(common, row.model_extra or {}), base, f"ablations {path}, row '{name}'"
            ).with_precision(dtype)
            for name, row in file.rows.items()
        }
        return cls(file.name, base, recipes, {name: row.read_variant(path.parent) for name, row in file.rows.items()})


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
        trunk = Trunk.prepare(recipe, plan.base, runs, device=device, reporter=reporter)
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
