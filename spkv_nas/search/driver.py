"""Run a search: score layouts without training, retrain the best briefly, and the best of those in full.

Each fidelity has its own studies in one storage (``search/queue.py``), so any number of processes can work on them: one
study of zero-shot scores per sampler and seed, one of short and one of full retrainings, with full attention and the
starting layouts as baselines. An evaluator (``search/evaluator.py``) scores and retrains, and keeps the results.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from spkv_nas.artifacts.comparison import FULL_ATTENTION
from spkv_nas.artifacts.grid import check_grid
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import BASELINE, Fidelity, Retraining
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.evaluation.paired import Score
from spkv_nas.search.evaluator import Evaluator
from spkv_nas.search.incumbents import FinishedLayouts
from spkv_nas.search.queue import Queue
from spkv_nas.search.registry import SAMPLERS
from spkv_nas.search.space import Space
from spkv_nas.search.storage import Storage, storage_errors
from spkv_nas.search.study_sampler import StudySampler
from spkv_nas.search.trials import TRIALS_PER_ROUND, Effort, LayoutCost, Result, Trial, first_front, ranked

CLAIM = 5  # maximum layouts a worker scores at once: their common first layers are computed once
POLL = 0.2  # seconds between polls while waiting for other workers
_DONE = (0.0,)  # value of a finished retraining for Optuna; its result is kept by the evaluator


class Search:
    """One search; every worker creates one with the same arguments and calls ``run``.

    Args:
        evaluator: evaluator that scores and retrains layouts.
        space: the search space.
        starts: layouts of the space to start from and to compare with, by name.
        others: layouts to compare with only.
        effort: numbers of trials, samplers, seeds and retrainings.
        folder: folder of the study and its lock, shared by the workers; unused with a database server.
        name: name prefix of the studies in the storage.
        cost: a second objective to minimise.
        storage: storage URL (``search/storage.py``); SQLite in ``folder`` by default.
        reporter: receives progress and status messages.

    Raises:
        UserError: the space is for another model than the evaluator's, or there is too little held-out text.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        space: Space,
        starts: Mapping[str, Layout],
        others: Mapping[str, Layout],
        effort: Effort,
        folder: Path,
        *,
        name: str,
        cost: LayoutCost | None = None,
        storage: str | None = None,
        reporter: Reporter = SILENT,
    ) -> None:
        """Check that space and evaluator match, and open the storage."""
        self.evaluator, self.space, self.effort, self.cost = evaluator, space, effort, cost
        self.starts, self.baselines = dict(starts), {**starts, **others}
        self._name, self._reporter = name, reporter
        grid = (evaluator.shape.num_layers, evaluator.shape.num_kv_heads)
        density = f"the density table '{space.table.name}'"
        check_grid(density, space.grid, "the recipe's model", grid, "give the recipe of that model")
        if evaluator.evaluation_tokens.sum() == 0:
            raise UserError(
                "no held-out document is left to evaluate full retrainings on: lower --max-tokens, or give more text"
            )
        self._storage = Storage(storage or f"sqlite:///{folder / 'study.db'}", folder / "queue.lock")

    def run(self) -> list[Trial]:
        """Work until every fidelity is finished; return all trials with their measurements.

        Raises:
            UserError: the study cannot be written, or is damaged.
        """
        with storage_errors():
            return self._run()

    def _run(self) -> list[Trial]:
        """Score, promote, retrain briefly, promote, retrain in full."""
        effort = self.effort
        trials = self._score([self._study(kind, seed) for kind in effort.samplers for seed in effort.seeds])
        if effort.num_short == 0:
            return trials
        trials = self._complete_promoted(trials, effort.num_short)
        trials = self._retrain("short", trials, self.promoted(trials, effort.num_short, "zero_shot"))
        if effort.num_full == 0:
            return trials
        return self._retrain("full", trials, self.promoted(trials, effort.num_full, "short"))

    def _complete_promoted(self, trials: list[Trial], number: int) -> list[Trial]:
        """Score the best ``number`` layouts of each sampler on the whole text, and return the updated trials.

        Layouts stopped early only have an estimate; scoring them fully may promote others in their place, hence the
        loop.
        """
        while True:
            estimated = {trial.layout.content_hash for trial in trials if trial.zero_shot.stopped}
            best = self.promoted(trials, number, "zero_shot")
            stopped = [layout for layout in best if layout.content_hash in estimated]
            if not stopped:
                return trials
            self._reporter.announce(f"scoring {len(stopped)} of the best layouts on the whole text")
            scores = self.evaluator.score(stopped, [None] * len(stopped), [])
            full_scores = {layout.content_hash: score for layout, score in zip(stopped, scores, strict=True)}
            trials = [
                replace(trial, zero_shot=full_scores.get(trial.layout.content_hash, trial.zero_shot))
                for trial in trials
            ]

    def _study(self, kind: str, seed: int) -> _Study:
        """Open the zero-shot study of a sampler and seed; its settings include all that results depend on."""
        # Record all that results depend on, so that a study with other settings is refused
        settings: dict[str, Any] = {
            "probe": f"{self.space.table.name} {_hash(self.space.table.density.round(6).tolist())}",
            "budget": list(self.space.budgets),
            "window": self.space.window,
            **({"sinks": self.space.sinks} if self.space.sinks else {}),
            "constraints": dict(self.space.constraints.named),
            "start": [layout.hash for layout in self.starts.values()],
            "objective": ["nll", *self._costs()],
            "checkpoint or text": self.evaluator.identity,
        }
        sampler, size = SAMPLERS[kind], self.effort.trials_per_round
        settings |= sampler.settings(self.space)
        # Open the task queue; the default size of a round is not part of its name
        study_name = f"{self._name}/{kind}-{seed}" + (f"-generation-{size}" if size != TRIALS_PER_ROUND else "")
        queue = Queue(
            self._storage,
            study_name,
            settings,
            metrics=["zero-shot ΔNLL, %", *([] if self.cost is None else [self.cost.name])],
        )
        return _Study(
            kind,
            seed,
            queue,
            StudySampler(self.space, sampler, seed, list(self.starts.values()), trials_per_round=size),
        )

    def _costs(self) -> list[str]:
        """Return name and three sample values of the cost, so that a resumed search uses the same cost function."""
        if self.cost is None:
            return []
        layers, heads = self.space.grid
        letters = ("L" * heads, "G" + "L" * (heads - 1), "G" * heads)
        costs = (self.cost.of(Layout((row,) * layers, self.space.window, sinks=self.space.sinks)) for row in letters)
        return [self.cost.name, *(f"{cost:.6g}" for cost in costs)]

    def _score(self, studies: Sequence[_Study]) -> list[Trial]:
        """Work on the zero-shot studies until all are finished; return the trials."""
        total = self.effort.trials
        fronts: dict[_Study, list[int]] = {study: [] for study in studies}
        self._reporter.reused(sum(map(len, self._finished(studies).values())), total * len(studies), "searched layouts")
        with self._reporter.bar("scoring layouts") as progress:
            while True:
                # Report progress and new fronts
                finished = self._finished(studies)
                progress(sum(len(trials) for trials in finished.values()), total * len(studies))
                for study, trials in finished.items():
                    fronts[study] = self._announce_front(study, trials, fronts[study])
                unfinished = [study for study, trials in finished.items() if len(trials) < total]
                if not unfinished:
                    return self._trials(finished)
                # Work on the first study with a free task
                for study in unfinished:
                    tasks = study.queue.claim(total, CLAIM, study.sampler.num_prior_results)
                    if tasks:
                        self._work(study, tasks)
                        break
                else:
                    time.sleep(POLL)  # other workers hold the remaining tasks of this round

    def _finished(self, studies: Sequence[_Study]) -> dict[_Study, dict[int, Result]]:
        """Return the finished trials of each study by number, without those beyond the requested number of trials."""
        return {
            study: {number: trial for number, trial in study.queue.results().items() if number < self.effort.trials}
            for study in studies
        }

    def _work(self, study: _Study, tasks: Sequence[int]) -> None:
        """Sample and score the layouts of claimed tasks, and record the results."""
        with study.queue.holding(tasks):
            results = study.queue.results()
            known_results = [results[index] for index in range(study.sampler.num_prior_results(tasks[-1]))]
            layouts = {index: study.sampler.layout(index, known_results) for index in tasks}
            scores = self._scores(study, layouts, results)
            for (index, layout), score in zip(layouts.items(), scores, strict=True):
                values = [score.percent, *self._costs_of(layout)]
                study.queue.finish(index, values, self.space.point(layout), stopped=score.stopped)

    def _scores(self, study: _Study, layouts: Mapping[int, Layout], trials: Mapping[int, Result]) -> list[Score]:
        """Score layouts by trial number, in order, each against the incumbent of the trials before it."""
        baselines = {layout.heads for layout in self.baselines.values()}
        scores: list[Score] = []
        for num_known, group_numbers in groupby(layouts, study.sampler.num_prior_results):
            finished = self._finished_before(num_known, trials)
            group = {number: layouts[number] for number in group_numbers}
            # Baselines, and trials known to run to the end, have no incumbent
            incumbents = [
                None
                if layout.heads in baselines or (number in trials and not trials[number].stopped)
                else finished.incumbent(self._costs_of(layout))
                for number, layout in group.items()
            ]
            scores += self.evaluator.score(list(group.values()), incumbents, finished.layouts)
        return scores

    def _finished_before(self, num_trials: int, trials: Mapping[int, Result]) -> FinishedLayouts:
        """Return the fully scored layouts among the first ``num_trials`` trials."""
        fully_scored = [trials[number] for number in range(num_trials) if not trials[number].stopped]
        values = {self.space.layout(trial.point): trial.values for trial in fully_scored}
        return FinishedLayouts(list(values), list(values.values()))

    def _costs_of(self, layout: Layout) -> list[float]:
        """Return the objectives besides the NLL."""
        return [] if self.cost is None else [self.cost.of(layout)]

    def _trials(self, finished: Mapping[_Study, Mapping[int, Result]]) -> list[Trial]:
        """Return baselines and all tried layouts as trials.

        Scores come from the evaluator's cache, or are computed again if that was deleted. A layout stopped early in one
        study but not in another gets the full score.
        """
        # Collect baselines and tried layouts with their scores
        entries = [(BASELINE, 0, number, layout) for number, layout in enumerate(self.baselines.values())]
        scores = self.evaluator.score([layout for *_, layout in entries], [None] * len(entries), [])
        for study, trials in finished.items():
            layouts = {number: self.space.layout(trial.point) for number, trial in trials.items()}
            entries += [(study.kind, study.seed, number, layout) for number, layout in layouts.items()]
            scores += self._scores(study, layouts, trials)
        # Prefer full scores to estimates of the same layout
        full_scores = {
            entry[-1].heads: score for entry, score in zip(entries, scores, strict=True) if not score.stopped
        }
        return [
            Trial(*entry, self.cost.of(entry[-1]) if self.cost else None, full_scores.get(entry[-1].heads, score))
            for entry, score in zip(entries, scores, strict=True)
        ]

    def _announce_front(self, study: _Study, trials: Mapping[int, Result], previous_front: list[int]) -> list[int]:
        """Announce the current front if it changed; return the trial numbers on it."""
        numbers = list(trials)
        front_rows = first_front(np.array([trials[n].values for n in numbers])) if numbers else []
        front = [numbers[index] for index in front_rows][: None if self.cost else 1]
        if front != previous_front:
            best, cheapest = (
                f"{trials[n].values[0]:+.3f} % with {self.space.layout(trials[n].point).num_global} heads"
                for n in (front[0], front[-1])
            )
            description = f"layout {front[0]}" if self.cost is None else f"{len(front)} layouts, to {cheapest}"
            self._reporter.announce(f"{study.kind}, seed {study.seed}, {len(trials)} scored: {best} ({description})")
        return front

    def promoted(self, trials: Sequence[Trial], number: int, by: Fidelity) -> list[Layout]:
        """Return the best ``number`` layouts of each sampler by change of NLL (with a cost: by successive fronts)."""
        baselines = {layout.content_hash for layout in self.baselines.values()}  # retrained anyway
        chosen: dict[str, Layout] = {}
        for kind in self.effort.samplers:
            # Collect the distinct layouts measured at this fidelity
            layouts: dict[str, Layout] = {}
            values: list[list[float]] = []
            for trial in trials:
                key, change = trial.layout.content_hash, trial.change(by)
                if trial.sampler != kind or key in baselines or key in layouts:
                    continue
                if change is not None:
                    layouts[key] = trial.layout
                    values.append([change.percent, *trial.values[1:]])
            # Take the best of them
            keys = list(layouts)
            chosen |= {keys[index]: layouts[keys[index]] for index in ranked(np.array(values))[:number]}
        return list(chosen.values())

    def _retrain(self, fidelity: Retraining, trials: Sequence[Trial], promoted: Iterable[Layout]) -> list[Trial]:
        """Work on the retrainings of a fidelity until all are finished; return the trials with their results."""
        # Open the queue of retrainings
        layouts = [*self.baselines.values(), *promoted]
        runs: list[Layout | None] = [None, *layouts]  # None is full attention
        names = [self.evaluator.run_name(fidelity, layout) for layout in runs]
        queue = Queue(self._storage, f"{self._name}/{fidelity}-{_hash(names)}", {"runs": names}, metrics=["finished"])
        self._reporter.reused(len(queue.results()), len(runs), f"{fidelity} retrainings")
        # Retrain one layout at a time until all workers have finished
        while len(queue.results()) < len(runs):
            tasks = queue.claim(len(runs), 1)
            if not tasks:
                time.sleep(POLL)
                continue
            layout, number = runs[tasks[0]], tasks[0] + 1
            title = FULL_ATTENTION if layout is None else f"{layout.strategy} {layout.hash}"
            self._reporter.announce(f"{fidelity} retraining: {title} ({number} of {len(runs)})")
            with queue.holding(tasks):
                self.evaluator.retrain(fidelity, layout)
                queue.finish(tasks[0], _DONE, names[tasks[0]])
        # Add the results to the trials
        changes = self.evaluator.retrained(fidelity, layouts)
        measured = {layout.content_hash: change for layout, change in zip(layouts, changes, strict=True)}
        return [trial.after(fidelity, measured.get(trial.layout.content_hash)) for trial in trials]


@dataclass(frozen=True, eq=False)
class _Study:
    """A zero-shot study: sampler, seed and task queue."""

    kind: str
    seed: int
    queue: Queue
    sampler: StudySampler


def _hash(content: Any) -> str:
    """Return a short hash of JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
