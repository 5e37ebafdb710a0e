"""Ablations: a list of overrides on one recipe, trained from one dense checkpoint, as the paper's table shows them.

SP-KV paper, table "Ablation Results" (appendix "Ablating design choices"): density, NLL, and their relative change from
a baseline, which is the first row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.distributed import on_main
from spkv_nas.base.files import read_yaml, write_atomic
from spkv_nas.base.schema import validate
from spkv_nas.base.version import environment
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.training.hybrids import branch_key, dense_checkpoint
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.run import Branch, load_corpus, start, train_branch

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

    variant: Literal["sp-kv", "full-attention"] = "sp-kv"
    layout: str | None = Field(None, description="a layout file, from the folder of the ablations: a hybrid")


class Ablations(BaseModel):
    """The file of ``spkv-nas ablate``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    recipe: dict[str, Any] | str = Field(description="the base recipe, or its file from the folder of the ablations")
    rows: dict[str, Row] = Field(min_length=1, description="by name; the first is the baseline")


def ablate(
    path: Path,
    workspace: Workspace,
    *,
    device: str | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> tuple[str, pd.DataFrame]:
    """Train every row of a file of ablations; write ``reports/<name>/ablations.csv`` after each.

    All rows are checked before the first is trained. A finished row is not trained again.

    Args:
        announce: told what starts, one line each.

    Returns:
        The name, and the table (columns ``COLUMNS``).

    Raises:
        UserError: naming the row and the key that is wrong.
    """
    workspace.check_writable()
    file = validate(Ablations, read_yaml(path, "ablations"), f"ablations {path}")
    base = path.parent
    if isinstance(file.recipe, str):
        base = (base / file.recipe).parent
        common = read_yaml(path.parent / file.recipe, "recipe")
    else:
        common = file.recipe
    recipes = {
        name: Recipe.parse(_merged(common, row.model_extra or {}), base, f"ablations {path}, row '{name}'")
        for name, row in file.rows.items()
    }
    layouts = {name: Layout.read(path.parent / row.layout) for name, row in file.rows.items() if row.layout}
    runs = workspace.run_dir(file.name)
    finished: dict[str, Branch] = {}
    rows = pd.DataFrame(columns=list(COLUMNS))
    for number, (name, recipe) in enumerate(recipes.items(), 1):
        announce(f"{name} ({number} of {len(recipes)})")
        start(recipe, device)
        corpus = load_corpus(recipe, base, runs)
        dense = dense_checkpoint(recipe, corpus, runs, device=device)
        variant = layouts.get(name, file.rows[name].variant)
        folder = runs / "branches" / branch_key(recipe, dense, variant, recipe.seed)
        finished[name] = train_branch(recipe, corpus, dense, folder, variant, device=device)
        rows = _table(finished, layouts)
        on_main(partial(_write, workspace.report_dir(file.name), rows, recipes))
    return file.name, rows


def _table(finished: Mapping[str, Branch], layouts: Mapping[str, Layout]) -> pd.DataFrame:
    """The rows that have finished, against the first."""
    rows: list[dict[str, Any]] = []
    for name, branch in finished.items():
        layout = layouts.get(name)
        density = layout.num_global / layout.num_heads if layout is not None else branch.density
        first = next(iter(finished.values()))
        change = paired_difference(branch.nll, first.nll)
        percent = 100.0 * (1.0 if density is None else density)
        reference = rows[0]["density_percent"] if rows else percent
        rows.append(
            {
                "name": name,
                "density_percent": percent,
                "delta_density_percent": 100.0 * (percent / reference - 1.0) if reference else float("nan"),
                "nll": branch.nll.mean,
                "delta_nll_percent": change.percent,
                "delta_nll_standard_error": change.standard_error,
                "steps": branch.steps,
            }
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _write(folder: Path, rows: pd.DataFrame, recipes: Mapping[str, Recipe]) -> None:
    summary = {
        "recipes": {name: recipe.model_dump(mode="json") for name, recipe in recipes.items()},
        "environment": environment(),
    }
    write_atomic(folder / "ablations.csv", rows.to_csv(index=False, float_format="%.6g"))
    write_atomic(folder / "ablations.yaml", yaml.safe_dump(summary, sort_keys=False, allow_unicode=True))


def _merged(base: Any, over: Mapping[str, Any]) -> Any:
    """``base`` with the keys of ``over``, section by section."""
    if not isinstance(base, Mapping):
        return dict(over)
    found = dict(base)
    for key, value in over.items():
        found[key] = _merged(found.get(key), value) if isinstance(value, Mapping) else value
    return found
