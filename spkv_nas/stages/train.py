"""Train: a recipe's two models, its retrained layouts, its ablations, and the palindrome comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from spkv_nas.artifacts.comparison import SP_KV
from spkv_nas.artifacts.density_log import read_density_log
from spkv_nas.base.assets import EMBEDDED
from spkv_nas.base.device import choose_device
from spkv_nas.base.distributed import on_main
from spkv_nas.base.files import read_text, write_atomic
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.tables import MOST_BYTES
from spkv_nas.stages.chosen import chosen_recipe, chosen_table
from spkv_nas.stages.common import find_proposal, quiet_transformers
from spkv_nas.stages.options import PALINDROME, AblateOptions, PalindromeOptions, TrainHybridOptions, TrainOptions
from spkv_nas.training import ablation, hybrids
from spkv_nas.training.branches import BranchContext
from spkv_nas.training.corpus import join_processes
from spkv_nas.training.dense import dense_run, is_dense_trained
from spkv_nas.training.palindrome import results
from spkv_nas.training.palindrome.run import PalindromeSettings, compare
from spkv_nas.training.palindrome.task import Palindromes
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant


@dataclass(frozen=True)
class Trained:
    """The checkpoints of a recipe."""

    dense: Path
    reference: Path


@dataclass(frozen=True)
class PalindromeResult:
    """The table of the palindrome comparison, and the folder of table, curves and figure."""

    rows: pd.DataFrame
    folder: Path


@dataclass(frozen=True)
class AblationResult:
    """The name of a file of ablations, the table of ``training.ablation``, and the table's folder."""

    name: str
    rows: pd.DataFrame
    folder: Path


def train(options: TrainOptions, reporter: Reporter = SILENT) -> Trained:
    """Train a recipe's dense model and its SP-KV branch. Finished ones are not trained again."""
    quiet_transformers(reporter)
    recipe = Recipe.read(options.recipe).with_precision(options.dtype)
    join_processes(recipe, options.device)
    place = options.place
    place.check_writable()
    for line in recipe.warnings():
        reporter.caution(f"warning: {line}")
    runs, variant = place.run_dir(recipe.name), Variant.sp_kv()
    recipe = on_main(lambda: recipe.settled(choose_device(options.device)))
    dense = dense_run(recipe, runs)
    finished = [] if dense is None else [is_dense_trained(dense)]
    trunk = BranchContext.prepare(recipe, options.recipe.parent, runs, device=options.device, reporter=reporter)
    finished.append(trunk.is_trained(variant))
    reporter.reused(sum(finished), len(finished), "runs")
    reference = trunk.train(variant).checkpoint
    on_main(lambda: _show_training(reference, place.report_dir(recipe.name)))
    return Trained(trunk.dense, reference)


def train_dense_model(options: TrainOptions, reporter: Reporter = SILENT) -> Path:
    """Train a recipe's dense model, unless it starts from a finished one, and return its checkpoint."""
    quiet_transformers(reporter)
    recipe = Recipe.read(options.recipe).with_precision(options.dtype)
    join_processes(recipe, options.device)
    options.place.check_writable()
    runs = options.place.run_dir(recipe.name)
    return BranchContext.prepare(recipe, options.recipe.parent, runs, device=options.device, reporter=reporter).dense


def _show_training(checkpoint: Path, folder: Path) -> None:
    """``density-evolution`` (.csv and figure) and ``heldout-log.csv`` of a run, if it was long enough to log them."""
    from spkv_nas.report.plot import save_chart
    from spkv_nas.report.training_charts import density_evolution_chart

    log, heldout = checkpoint / "density-log.csv", checkpoint / "heldout-log.csv"
    if log.is_file():
        rows = read_density_log(log)
        write_atomic(folder / "density-evolution.csv", read_text(log, "density log", most=MOST_BYTES))
        save_chart(folder, density_evolution_chart(rows))
    if heldout.is_file():
        write_atomic(folder / "heldout-log.csv", read_text(heldout, "held-out log", most=MOST_BYTES))


def train_hybrid(options: TrainHybridOptions, reporter: Reporter = SILENT) -> hybrids.Comparison:
    """Retrain layouts (all of the workspace's by default) and compare them, to ``reports/<name>/``."""
    place = options.place
    table = chosen_table(options, reporter)
    proposal = find_proposal(place, table.name, options.layouts)
    path = chosen_recipe(options, table, "demo.yaml")
    recipe = Recipe.read(path).with_precision(options.dtype)
    if (missed := table.missed_price) is not None:
        reporter.caution(missed)
    proposal.warn_of_windows({f"{SP_KV} (recipe {path})": recipe.gates.window} if options.reference else None)
    quiet_transformers(reporter)
    if recipe.gates.start_from is None:
        for line in recipe.warnings():
            reporter.caution(f"warning: {line}")
    return hybrids.train_hybrids(
        recipe, proposal.layouts, proposal.table(table), place, base=path.parent, num_seeds=options.seeds,
        reference=options.reference, device=options.device, reporter=reporter,
    )  # fmt: skip


def ablate(options: AblateOptions, reporter: Reporter = SILENT) -> AblationResult:
    """Train the rows of a file of ablations, by default the embedded ones, to ``reports/<name>/``."""
    quiet_transformers(reporter)
    file, place = options.file or EMBEDDED / "ablations.yaml", options.place
    name, rows = ablation.ablate(file, place, device=options.device, dtype=options.dtype, reporter=reporter)
    return AblationResult(name, rows, place.report_dir(name))


def palindrome(options: PalindromeOptions, reporter: Reporter = SILENT) -> PalindromeResult:
    """Train the paper's palindrome comparison and write it to ``reports/<name>/``."""
    from spkv_nas.report.plot import save_chart
    from spkv_nas.report.training_charts import palindrome_charts

    quiet_transformers(reporter)
    options.place.check_writable()
    settings = palindrome_settings(options)
    name = options.name or PALINDROME
    device = choose_device(options.device)
    folder = options.place.report_dir(name)
    finished = compare(settings, options.place.run_dir(name), device=device, reporter=reporter)
    results.write_results(folder, settings, finished)
    save_chart(folder, palindrome_charts(results.curve_table(finished), Palindromes(0).chance_nll))
    return PalindromeResult(results.result_table(settings, finished), folder)


def palindrome_settings(options: PalindromeOptions) -> PalindromeSettings:
    """The comparison's settings, with those that options give."""
    given = {"steps": options.steps, "batch_size": options.batch_size, "seed": options.seed}
    return PalindromeSettings(**{key: value for key, value in given.items() if value is not None})
