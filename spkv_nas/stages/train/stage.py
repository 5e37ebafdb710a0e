"""Train a recipe's two models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spkv_nas.artifacts.density_log import read_density_log
from spkv_nas.base.console import say
from spkv_nas.base.device import choose_device
from spkv_nas.base.distributed import on_main
from spkv_nas.base.files import read_text, write_atomic
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.tables import MAX_BYTES
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.train.options import TrainOptions
from spkv_nas.training.branches import BranchContext
from spkv_nas.training.corpus import join_processes
from spkv_nas.training.dense import dense_run, is_dense_trained
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant


@dataclass(frozen=True)
class Trained:
    """Checkpoints that a recipe trains.

    Attributes:
        dense: folder of the dense model.
        reference: folder of the SP-KV reference.
    """

    dense: Path
    reference: Path


def train(options: TrainOptions, reporter: Reporter = SILENT) -> Trained:
    """Train a recipe's dense model and its SP-KV branch, reusing finished runs."""
    quiet_transformers(reporter)
    recipe = Recipe.read(options.recipe).with_precision(options.dtype)
    join_processes(recipe, options.device)
    workspace = options.folders
    workspace.check_writable()
    for line in recipe.warnings():
        reporter.caution(f"warning: {line}")
    # Count what is finished
    runs, variant = workspace.run_dir(recipe.name), Variant.sp_kv()
    recipe = on_main(lambda: recipe.resolve_precision(choose_device(options.device)))
    dense = dense_run(recipe, runs)
    finished = [] if dense is None else [is_dense_trained(dense)]
    context = BranchContext.prepare(recipe, options.recipe.parent, runs, device=options.device, reporter=reporter)
    finished.append(context.is_trained(variant))
    reporter.reused(sum(finished), len(finished), "runs")
    # Train the SP-KV branch
    reference = context.train(variant).checkpoint
    on_main(lambda: _show_training(reference, workspace.report_dir(recipe.name)))
    return Trained(context.dense, reference)


def train_dense_model(options: TrainOptions, reporter: Reporter = SILENT) -> Path:
    """Train a recipe's dense model, unless it is finished or given, and return its checkpoint."""
    quiet_transformers(reporter)
    recipe = Recipe.read(options.recipe).with_precision(options.dtype)
    join_processes(recipe, options.device)
    options.folders.check_writable()
    runs = options.folders.run_dir(recipe.name)
    return BranchContext.prepare(recipe, options.recipe.parent, runs, device=options.device, reporter=reporter).dense


def _show_training(checkpoint: Path, folder: Path) -> None:
    """Write ``density-evolution`` (.csv, figure) and ``heldout-log.csv`` of a run that was long enough to log them."""
    from spkv_nas.report.plot import save_chart
    from spkv_nas.report.training_charts import density_evolution_chart

    log, heldout = checkpoint / "density-log.csv", checkpoint / "heldout-log.csv"
    if log.is_file():
        rows = read_density_log(log)
        write_atomic(folder / "density-evolution.csv", read_text(log, "density log", max_bytes=MAX_BYTES))
        save_chart(folder, density_evolution_chart(rows))
    if heldout.is_file():
        write_atomic(folder / "heldout-log.csv", read_text(heldout, "held-out log", max_bytes=MAX_BYTES))


def show(result: Trained) -> None:
    """Print the paths of a recipe's checkpoints."""
    say(f"dense checkpoint: {result.dense}\nSP-KV reference:  {result.reference}")
