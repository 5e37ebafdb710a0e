"""Time the overhead of a search, everything except scoring, at 80 layers x 8 KV heads (a few minutes).

Run ``python reports/search_bookkeeping.py``. Several worker processes share a search in which a formula scores the
layouts, either instantly or after ``--seconds`` of sleep; all their other work is overhead. The table reports seconds
per trial: elapsed time, CPU time, and the time of all workers in each part of the work, excluding parts that it calls.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import numpy as np
import optuna

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import Retraining
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.console import say
from spkv_nas.evaluation.paired import PairedDifference, Score
from spkv_nas.search.driver import Search
from spkv_nas.search.queue import Queue
from spkv_nas.search.registry import SAMPLERS
from spkv_nas.search.space import Space
from spkv_nas.search.study_sampler import StudySampler
from spkv_nas.search.trials import TRIALS_PER_ROUND, Effort

SHAPE = Shape(num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, num_parameters=70_000_000_000)
BUDGET, WINDOW = 160, 128


class Formula:
    """Evaluator that scores a layout by the sum of its heads' weights, a few of them large, plus noise per layout.

    Like a real evaluator it caches scores in a folder; cached ones take no time.
    """

    shape, settings = SHAPE, {"name": "a formula"}
    identity = "a formula"
    num_selection_tokens = 1
    num_selection_documents = 1
    evaluation_tokens = np.array([1])

    def __init__(self, folder: Path, seconds: float) -> None:
        """Draw the weights; scores are cached in ``folder`` and take ``seconds``."""
        generator = np.random.default_rng(0)
        weights = 0.05 * generator.standard_normal((SHAPE.num_layers, SHAPE.num_kv_heads))
        self.weights = weights + (generator.random(weights.shape) < 0.05) * generator.random(weights.shape)
        self._folder, self._seconds = folder, seconds

    def score(
        self, layouts: Sequence[Layout], incumbents: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[Score]:
        """Score every layout to the end."""
        return [self._score(layout) for layout in layouts]

    def _score(self, layout: Layout) -> Score:
        """Return the score of a layout, after a delay unless it is cached."""
        cache_file = self._folder / layout.content_hash
        if not cache_file.exists():
            Event().wait(self._seconds)  # not time.sleep, which counts as waiting for others
            cache_file.touch()
        noise = 0.05 * np.random.default_rng(int(layout.content_hash, 16)).standard_normal()
        return Score(float(noise - self.weights[layout.global_mask].sum()), 0.1, 1)

    def steps(self, fidelity: Retraining) -> int:
        """Return 0."""
        return 0

    def alarm(self, changes: Sequence[PairedDifference]) -> str | None:
        """Return None: the scores are made up."""
        return None

    def run_name(self, fidelity: Retraining, layout: Layout | None) -> str:
        """Raise: nothing is retrained."""
        raise AssertionError

    def retrain(self, fidelity: Retraining, layout: Layout | None) -> None:
        """Do nothing."""

    def control(self, fidelity: Retraining) -> PairedDifference:
        """Raise: nothing is retrained."""
        raise AssertionError

    def retrained(self, fidelity: Retraining, layouts: Sequence[Layout]) -> list[PairedDifference]:
        """Return no changes."""
        return []


class Clock:
    """Measures seconds per part of the work; time of a nested part counts for that part only."""

    def __init__(self) -> None:
        """Start timing with the part "else"."""
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._parts, self._since = ["else"], time.perf_counter()

    def watch(self, part: str, owner: Any, name: str) -> None:
        """Count the time spent in the function ``owner.name`` as that of a part."""
        function: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **keywords: Any) -> Any:
            """Call the function, timed."""
            self._stop()
            self._parts.append(part)
            try:
                return function(*args, **keywords)
            finally:
                self._stop()
                self._parts.pop()

        setattr(owner, name, wrapped)

    def _stop(self) -> None:
        """Add the elapsed time to the current part."""
        now = time.perf_counter()
        self.spent[self._parts[-1]] += now - self._since
        self._since = now


PARTS = {
    "claiming": (Queue, "claim"),
    "sampling": (StudySampler, "layout"),
    "finishing": (Queue, "finish"),
    "reading": (Queue, "results"),
    "waiting": (time, "sleep"),  # for the lock, or until others have finished
    "scoring": (Formula, "score"),
}


def work(folder: Path, effort: Effort, seconds: float, ready: Barrier) -> tuple[dict[str, float], float, float]:
    """Run one worker.

    Returns:
        Its seconds per part and of CPU time, and when it started and ended.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = Space(HeadScores.read(folder / "density.csv"), (BUDGET, BUDGET), WINDOW)
    start = space.optimum(space.table.density, BUDGET)
    ready.wait()
    start_time, clock, processor = time.time(), Clock(), time.process_time()
    for part, (owner, name) in PARTS.items():
        clock.watch(part, owner, name)
    Search(Formula(folder / "scores", seconds), space, {"start": start}, {}, effort, folder, name="x").run()
    clock.spent["processor"] = time.process_time() - processor
    return clock.spent, start_time, time.time()


def measure(samplers: str, workers: int, trials: int, seconds: float, size: int) -> None:
    """Run a search with several workers and print a row of the table."""
    effort = Effort(trials=trials, samplers=tuple(samplers.split(",")), num_short=0, num_full=0, trials_per_round=size)
    processes = multiprocessing.get_context("spawn")
    # Write a density table that hints at the weights, and run the workers
    with tempfile.TemporaryDirectory() as name, processes.Manager() as manager:
        folder, weights = Path(name), Formula(Path(name), seconds).weights
        (folder / "scores").mkdir()
        hint = np.clip(0.3 + weights + 0.1 * np.random.default_rng(1).standard_normal(weights.shape), 0.01, 0.99)
        rows = [f"{layer},{head},{density:.3f}" for (layer, head), density in np.ndenumerate(hint)]
        (folder / "density.csv").write_text("\n".join(["layer,kv_head,density", *rows, ""]))
        with ProcessPoolExecutor(workers, processes) as pool:
            ready = manager.Barrier(workers)
            futures = [pool.submit(work, folder, effort, seconds, ready) for _ in range(workers)]
            spent, starts, ends = zip(*(worker_result.result() for worker_result in futures), strict=True)
    # Print seconds per trial
    total = {
        part: sum(worker_result.get(part, 0.0) for worker_result in spent) for part in ("processor", *PARTS, "else")
    }
    elapsed = max(ends) - min(starts)
    cells = [elapsed, *total.values()]
    row = " | ".join(f"{cell / trials / len(effort.samplers):.3f}" for cell in cells)
    say(f"| {samplers} | {workers} | {size} | {row} | {100 * total['scoring'] / elapsed / workers:.0f} % |")


def main() -> None:
    """Measure every sampler with every number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--samplers", nargs="+", default=list(SAMPLERS.names), help="samplers to time; a,b: both in one study"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="simulated duration of scoring one layout, in seconds"
    )
    parser.add_argument("--trials-per-round", type=int, nargs="+", default=[TRIALS_PER_ROUND])
    options = parser.parse_args()
    columns = ["sampler", "workers", "per round", "passed", "processor", *PARTS, "else", "busy scoring"]
    say(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for samplers, workers, size in product(options.samplers, options.workers, options.trials_per_round):
        measure(samplers, workers, options.trials, options.seconds, size)


if __name__ == "__main__":
    main()
