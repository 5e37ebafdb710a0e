"""Measure how much time racing (early stopping of scores) saves in a search, and whether it changes the result.

Run ``python reports/racing.py``; three seeds take half an hour on one core. The search is that of ``spkv-nas search
--budget 18`` on the committed probe, without comparison samplers, without results of earlier searches and without
retraining. The CPU time of each score is reported as a multiple of one plain pass over the same text (median of three
passes in the same process).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import optuna
import torch

from spkv_nas.artifacts.defaults import SAMPLER
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import Retraining
from spkv_nas.base.assets import EMBEDDED
from spkv_nas.base.console import say
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.paired import PairedDifference, Score
from spkv_nas.search.driver import Search
from spkv_nas.stages.search.options import SearchOptions
from spkv_nas.stages.search.specification import specify
from spkv_nas.training.branches import BranchContext
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.recipe_evaluator import RecipeEvaluator

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 65_536


class TimedEvaluator(RecipeEvaluator):
    """Evaluator that counts the CPU seconds of its scores and retrains nothing."""

    seconds = 0.0

    def score(
        self, layouts: Sequence[Layout], incumbents: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[Score]:
        """Score as the base class does, and add the CPU time."""
        start = time.process_time()
        scores = super().score(layouts, incumbents, finished)
        self.seconds += time.process_time() - start
        return scores

    def retrain(self, fidelity: Retraining, layout: Layout | None) -> None:
        """Do nothing."""

    def retrained(self, fidelity: Retraining, layouts: Sequence[Layout]) -> list[PairedDifference]:
        """Return zero changes."""
        return [PairedDifference(0.0, 0.0)] * len(layouts)


def measure(context: BranchContext, options: SearchOptions) -> None:
    """Run a search and print a row of the table."""
    # Load the model and the text
    specification = specify(options)
    model = context.load_dense()
    blocks = context.corpus.heldout.take(TOKENS // context.corpus.heldout.block_size)

    def plain_pass() -> float:
        """Return the CPU seconds of one pass over the text."""
        start = time.process_time()
        document_nll(model, blocks, batch_size=context.recipe.evaluation.batch_size)
        return time.process_time() - start

    # Run the search, timing plain passes before and after it
    with tempfile.TemporaryDirectory() as folder:
        evaluator = TimedEvaluator(replace(context, runs=Path(folder)), max_tokens=TOKENS, racing=options.racing)
        evaluator.score([], [], [])  # full attention's score, once per search
        evaluator.seconds = 0.0
        plain_seconds = [plain_pass()]
        starts, others = specification.candidates.starts, specification.candidates.others
        trials = Search(
            evaluator, specification.space, starts, others, specification.effort, Path(folder), name="racing"
        ).run()
        plain_seconds += [plain_pass(), plain_pass()]
    # Print the cost per score in plain passes
    scores = [trial.zero_shot for trial in trials if trial.sampler == SAMPLER]
    best = min(score.percent for score in scores if not score.stopped)
    say(
        f"{'raced' if options.racing else 'whole':5}  {options.seed:4}  {options.num_short:5}  "
        f"{evaluator.seconds / len(scores) / statistics.median(plain_seconds):21.2f}  "
        f"{sum(score.stopped for score in scores):7} of {len(scores)}  {best:+.3f}"
    )


def main() -> None:
    """Measure every seed with and without racing, and with and without retraining candidates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--short", type=int, nargs="+", default=[8, 0], help="number of layouts to retrain briefly")
    options = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    recipe = Recipe.read(EMBEDDED / "search.yaml")
    with tempfile.TemporaryDirectory() as folder:
        context = BranchContext.prepare(recipe, EMBEDDED, Path(folder))
        say("        seed  short  cost in plain passes  stopped        best zero-shot dNLL %")
        for seed, short, racing in product(range(options.seeds), options.short, (True, False)):
            settings: dict[str, Any] = {
                "seed": seed,
                "num_short": short,
                "num_full": 0,
                "trials": options.trials,
                "racing": racing,
            }
            measure(
                context,
                SearchOptions(workspace=ROOT, probe=EMBEDDED.name, budget="18", compare_samplers="none", **settings),
            )


if __name__ == "__main__":
    main()
