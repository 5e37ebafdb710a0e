"""What racing saves in a search, and what it costs: python reports/racing.py, half an hour of one core for three seeds.

The search of ``spkv-nas search --budget 18 --control none`` on the committed probe, with nothing kept from earlier ones
and nothing retrained. Of every score, those that end the short list's included, the processor seconds are given in
those of a plain pass over the same text, median of three in the same process.
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

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.samplers import SURROGATE
from spkv_nas.artifacts.search_table import Retraining
from spkv_nas.base.assets import EMBEDDED
from spkv_nas.cli.console import say
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.paired import PairedDifference, Score
from spkv_nas.search.driver import Search
from spkv_nas.stages.options import SearchOptions
from spkv_nas.stages.question import ask
from spkv_nas.training.branches import BranchContext
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.recipe_evaluator import RecipeEvaluator

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 65_536


class TimedJudge(RecipeEvaluator):
    """Counts the processor seconds of its scores, and retrains nothing."""

    seconds = 0.0

    def score(
        self, layouts: Sequence[Layout], rivals: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[Score]:
        """As a judge does."""
        start = time.process_time()
        found = super().score(layouts, rivals, finished)
        self.seconds += time.process_time() - start
        return found

    def retrain(self, fidelity: Retraining, layout: Layout | None) -> None:
        """Nothing."""

    def retrained(self, fidelity: Retraining, layouts: Sequence[Layout]) -> list[PairedDifference]:
        """Nothing is lost by a layout."""
        return [PairedDifference(0.0, 0.0)] * len(layouts)


def measure(trunk: BranchContext, options: SearchOptions) -> None:
    """A search; prints a row."""
    asked = ask(options)
    model = trunk.load_dense()
    blocks = trunk.corpus.heldout.take(TOKENS // trunk.corpus.heldout.block_size)

    def plain_pass() -> float:
        start = time.process_time()
        document_nll(model, blocks, batch_size=trunk.recipe.evaluation.batch_size)
        return time.process_time() - start

    with tempfile.TemporaryDirectory() as folder:
        judge = TimedJudge(replace(trunk, runs=Path(folder)), max_tokens=TOKENS, racing=options.racing)
        judge.score([], [], [])  # full attention's score, once per search
        judge.seconds = 0.0
        plain = [plain_pass()]
        starts, others = asked.candidates.starts, asked.candidates.others
        trials = Search(judge, asked.space, starts, others, asked.effort, Path(folder), name="racing").run()
        plain += [plain_pass(), plain_pass()]
    scores = [trial.zero_shot for trial in trials if trial.sampler == SURROGATE]
    best = min(score.percent for score in scores if not score.stopped)
    say(
        f"{'raced' if options.racing else 'whole':5}  {options.seed:4}  {options.short:5}  "
        f"{judge.seconds / len(scores) / statistics.median(plain):21.2f}  "
        f"{sum(score.stopped for score in scores):7} of {len(scores)}  {best:+.3f}"
    )


def main() -> None:
    """Every seed, raced and not, with a short list and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--short", type=int, nargs="+", default=[8, 0], help="layouts that would be retrained")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    recipe = Recipe.read(EMBEDDED / "search.yaml")
    with tempfile.TemporaryDirectory() as folder:
        trunk = BranchContext.prepare(recipe, EMBEDDED, Path(folder))
        say("        seed  short  cost in plain passes  stopped        best zero-shot dNLL %")
        for seed, short, racing in product(range(asked.seeds), asked.short, (True, False)):
            how: dict[str, Any] = {"seed": seed, "short": short, "full": 0, "trials": asked.trials, "racing": racing}
            measure(trunk, SearchOptions(workspace=ROOT, probe=EMBEDDED.name, budget="18", control="none", **how))


if __name__ == "__main__":
    main()
