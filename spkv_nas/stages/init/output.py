"""Print what ``init`` returns, and its JSON document."""

from __future__ import annotations

from typing import Any

from spkv_nas.base.console import print_path
from spkv_nas.stages import planned_runs
from spkv_nas.stages.init.stage import FirstRecipe


def show(result: FirstRecipe) -> None:
    """Print the plan of a recipe's runs, and the recipe's path."""
    planned_runs.show(result.plan)
    print_path("recipe", result.file)


def document(result: FirstRecipe) -> dict[str, Any]:
    """Return the recipe's path and the plan of its runs."""
    return {"recipe": result.file, "plan": planned_runs.document(result.plan)}
