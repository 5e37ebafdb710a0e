"""Train the dense model of a recipe and its SP-KV reference, for ``train`` and ``probe RECIPE``."""

from dataclasses import dataclass
from pathlib import Path

from spkv_nas.artifacts.head_tables import read_density_log
from spkv_nas.base import distributed, files, tables
from spkv_nas.base.device import choose_device
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.workspace import Workspace
from spkv_nas.training import branches, corpus, variants
from spkv_nas.training.dense import dense_run, is_dense_trained
from spkv_nas.training.recipe import Recipe


@dataclass(frozen=True)
class Trained:
    """Checkpoints that a recipe trains."""

    dense: Path  # folder of the dense model
    reference: Path  # folder of the SP-KV reference


def train_reference(
    file: Path,
    workspace: Workspace,
    *,
    device: str | None,
    dtype: str | None = None,
    reporter: Reporter = SILENT,
) -> Trained:
    """Train a recipe's dense model and its SP-KV branch, reusing finished runs; ``dtype`` replaces its precision."""
    # Read the recipe, and warn before hours of work
    recipe = Recipe.read(file).with_precision(dtype)
    corpus.join_processes(recipe, device)
    for line in recipe.warnings():
        reporter.caution(f"warning: {line}")
    # Count what is finished
    runs = workspace.run_dir(recipe.name)
    variant = variants.Variant.sp_kv()
    recipe = distributed.on_main(lambda: recipe.resolve_precision(choose_device(device)))
    dense = dense_run(recipe, runs)
    finished = [] if dense is None else [is_dense_trained(dense)]
    context = branches.BranchContext.prepare(
        recipe, file.parent, runs, device=device, reporter=reporter
    )
    finished.append(context.is_trained(variant))
    reporter.reused(sum(finished), len(finished), "runs")
    # Train the SP-KV branch
    reference = context.train(variant).checkpoint
    distributed.on_main(lambda: _show_training(reference, workspace.report_dir(recipe.name)))
    return Trained(context.dense, reference)


def train_dense(
    file: Path, workspace: Workspace, *, device: str | None, reporter: Reporter = SILENT
) -> Path:
    """Train a recipe's dense model, unless it is finished or given, and return its checkpoint."""
    recipe = Recipe.read(file)
    corpus.join_processes(recipe, device)
    runs = workspace.run_dir(recipe.name)
    return branches.BranchContext.prepare(
        recipe, file.parent, runs, device=device, reporter=reporter
    ).dense


def _show_training(checkpoint: Path, folder: Path) -> None:
    """Write ``density-evolution`` (.csv, figure) of a run that was long enough to log it."""
    from spkv_nas.report import density_charts, plot

    log = checkpoint / "density-log.csv"
    if log.is_file():
        rows = read_density_log(log)
        files.write_atomic(
            folder / "density-evolution.csv",
            files.read_text(log, "density log", max_bytes=tables.MAX_BYTES),
        )
        plot.save_chart(folder, density_charts.density_evolution_chart(rows))
