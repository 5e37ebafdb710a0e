"""What a search does beside scoring, at 80 layers x 8 KV heads: python reports/search_bookkeeping.py, some minutes.

Workers, a process each, search together for layouts that a formula scores, in no time or in ``--seconds`` of sleep.
Whatever else they do is bookkeeping. The table gives seconds by the number of trials: those that pass until all are
done, those of processors, and those of all workers together in each part of the work, without what it calls of others.
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
from spkv_nas.artifacts.samplers import SAMPLERS
from spkv_nas.artifacts.search_table import Retraining
from spkv_nas.artifacts.shape import Shape
from spkv_nas.cli.console import say
from spkv_nas.evaluation.paired import PairedDifference, Score
from spkv_nas.search.driver import Search
from spkv_nas.search.queue import Queue
from spkv_nas.search.sampler import Sampler
from spkv_nas.search.space import Space
from spkv_nas.search.trials import GENERATION, Effort

SHAPE = Shape(num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, num_parameters=70_000_000_000)
BUDGET, WINDOW = 160, 128


class Formula:
    """Judges a layout by the sum of its heads' weights, a few of them large, and noise of its own.

    As a real judge it keeps its scores in a folder, and takes no time for those.
    """

    shape, settings = SHAPE, {"name": "a formula"}
    identity = "a formula"
    tokens_chosen_on = 1
    judged_on = np.array([1])

    def __init__(self, folder: Path, seconds: float) -> None:
        generator = np.random.default_rng(0)
        weights = 0.05 * generator.standard_normal((SHAPE.num_layers, SHAPE.num_kv_heads))
        self.weights = weights + (generator.random(weights.shape) < 0.05) * generator.random(weights.shape)
        self._folder, self._seconds = folder, seconds

    def score(
        self, layouts: Sequence[Layout], rivals: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[Score]:
        """Nothing is stopped."""
        return [self._score(layout) for layout in layouts]

    def _score(self, layout: Layout) -> Score:
        known = self._folder / layout.content_hash
        if not known.exists():
            Event().wait(self._seconds)  # not time.sleep, which is counted as waiting for others
            known.touch()
        noise = 0.05 * np.random.default_rng(int(layout.content_hash, 16)).standard_normal()
        return Score(float(noise - self.weights[layout.global_mask].sum()), 0.1, 1)

    def steps(self, fidelity: Retraining) -> int:
        """None."""
        return 0

    def run_name(self, fidelity: Retraining, layout: Layout | None) -> str:
        """Not asked for: nothing is retrained."""
        raise AssertionError

    def retrain(self, fidelity: Retraining, layout: Layout | None) -> None:
        """Nothing."""

    def control(self, fidelity: Retraining) -> PairedDifference:
        """Nothing was retrained."""
        raise AssertionError

    def retrained(self, fidelity: Retraining, layouts: Sequence[Layout]) -> list[PairedDifference]:
        """Nothing was."""
        return []


class Clock:
    """Seconds of parts of the work; a part that is called within another counts for itself alone."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._parts, self._since = ["else"], time.perf_counter()

    def watch(self, part: str, owner: Any, name: str) -> None:
        """Count the time of a function, ``owner.name``, as that of a part."""
        function: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **more: Any) -> Any:
            self._stop()
            self._parts.append(part)
            try:
                return function(*args, **more)
            finally:
                self._stop()
                self._parts.pop()

        setattr(owner, name, wrapped)

    def _stop(self) -> None:
        now = time.perf_counter()
        self.spent[self._parts[-1]] += now - self._since
        self._since = now


PARTS = {
    "claiming": (Queue, "claim"),
    "sampling": (Sampler, "layout"),
    "finishing": (Queue, "finish"),
    "reading": (Queue, "results"),
    "waiting": (time, "sleep"),  # for the lock, or until others have finished
    "scoring": (Formula, "score"),
}


def work(folder: Path, effort: Effort, seconds: float, ready: Barrier) -> tuple[dict[str, float], float, float]:
    """One worker's seconds of each part and of its processor, and when it began and ended."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = Space(HeadScores.read(folder / "density.csv"), (BUDGET, BUDGET), WINDOW)
    start = space.optimum(space.table.density, BUDGET)
    ready.wait()
    began, clock, processor = time.time(), Clock(), time.process_time()
    for part, (owner, name) in PARTS.items():
        clock.watch(part, owner, name)
    Search(Formula(folder / "scores", seconds), space, {"start": start}, {}, effort, folder, name="x").run()
    clock.spent["processor"] = time.process_time() - processor
    return clock.spent, began, time.time()


def measure(samplers: str, workers: int, trials: int, seconds: float, generation: int) -> None:
    """A search by so many workers; prints a row."""
    effort = Effort(trials=trials, samplers=tuple(samplers.split(",")), short=0, full=0, generation=generation)
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name, processes.Manager() as manager:
        folder, weights = Path(name), Formula(Path(name), seconds).weights
        (folder / "scores").mkdir()
        hint = np.clip(0.3 + weights + 0.1 * np.random.default_rng(1).standard_normal(weights.shape), 0.01, 0.99)
        rows = [f"{layer},{head},{density:.3f}" for (layer, head), density in np.ndenumerate(hint)]
        (folder / "density.csv").write_text("\n".join(["layer,kv_head,density", *rows, ""]))
        with ProcessPoolExecutor(workers, processes) as pool:
            ready = manager.Barrier(workers)
            done = [pool.submit(work, folder, effort, seconds, ready) for _ in range(workers)]
            spent, began, ended = zip(*(one.result() for one in done), strict=True)
    total = {part: sum(one.get(part, 0.0) for one in spent) for part in ("processor", *PARTS, "else")}
    passed = max(ended) - min(began)
    cells = [passed, *total.values()]
    shown = " | ".join(f"{cell / trials / len(effort.samplers):.3f}" for cell in cells)
    say(f"| {samplers} | {workers} | {generation} | {shown} | {100 * total['scoring'] / passed / workers:.0f} % |")


def main() -> None:
    """Every sampler with every number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), help="several at once: a,b")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=0.0, help="that a score takes")
    parser.add_argument("--generation", type=int, nargs="+", default=[GENERATION])
    asked = parser.parse_args()
    columns = ["sampler", "workers", "generation", "passed", "processor", *PARTS, "else", "busy scoring"]
    say(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for samplers, workers, generation in product(asked.samplers, asked.workers, asked.generation):
        measure(samplers, workers, asked.trials, asked.seconds, generation)


if __name__ == "__main__":
    main()
