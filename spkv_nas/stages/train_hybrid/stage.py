"""Retrain layouts from one dense checkpoint and compare them."""

from __future__ import annotations

from spkv_nas.artifacts.comparison import SP_KV
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.chosen import chosen_recipe, chosen_table
from spkv_nas.stages.lookup import find_proposal
from spkv_nas.stages.train_hybrid.options import TrainHybridOptions
from spkv_nas.training import hybrids
from spkv_nas.training.recipe import Recipe


def train_hybrid(options: TrainHybridOptions, reporter: Reporter = SILENT) -> hybrids.Comparison:
    """Retrain layouts, by default all of the workspace's, and write their comparison to ``reports/<name>/``."""
    workspace = options.folders
    # Read probe, layouts and recipe
    table = chosen_table(options, reporter)
    proposal = find_proposal(workspace, table.name, options.layouts)
    recipe_file = chosen_recipe(options, table, "demo.yaml")
    recipe = Recipe.read(recipe_file).with_precision(options.dtype)
    # Warn before hours of work
    if (missed_price := table.missed_price) is not None:
        reporter.caution(missed_price)
    proposal.warn_of_windows({f"{SP_KV} (recipe {recipe_file})": recipe.gates.window} if options.reference else None)
    quiet_transformers(reporter)
    for line in recipe.warnings() if options.reference else ():
        reporter.caution(f"warning: {line}")
    # Retrain and compare
    return hybrids.train_hybrids(
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
