"""Run a search, in any number of processes: score layouts, retrain the best briefly, and their best in full."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from spkv_nas.artifacts.grid import check_grid
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import BASELINE, Retraining
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.contrib.search import options, recipe_evaluator
from spkv_nas.contrib.search.sampler import SAMPLERS, StudySampler
from spkv_nas.contrib.search.space import LayoutCost, Trial, best_start, distinct, ranked
from spkv_nas.contrib.search.storage import (
    INDEX,
    finished,
    open_storage,
    open_study,
    storage_errors,
    work,
)
from spkv_nas.evaluation.paired import PairedDifference

_SCORE = "score"  # user attribute of a scored trial: rows of the layout, standard error, hash


class Search:
    """One search; every worker creates one with the same arguments and calls ``run``.

    Args:
        evaluator: measures layouts. Scores without training are relative to the dense model, those of retrained layouts
            to the control, on documents that nothing was selected on.
        specification: space, effort, and layouts to start from and to compare with, which are retrained with the best.
        folder: folder of the study, shared by the workers; unused with a database server.
        storage: storage URL; SQLite in ``folder`` by default.

    Raises ``UserError``: the space is for another model than the evaluator's, or there is too little held-out text.
    """

    def __init__(
        self,
        evaluator: recipe_evaluator.RecipeEvaluator,
        specification: options.SearchSpecification,
        folder: Path,
        *,
        cost: LayoutCost | None = None,
        storage: str | None = None,
        reporter: Reporter = SILENT,
    ) -> None:
        """Check that space and evaluator match, and open the storage."""
        self.evaluator = evaluator
        self.cost = cost
        self._name = specification.name
        self._reporter = reporter
        self.starts = specification.starts
        self.others = specification.given
        self.space = specification.space
        self.effort = specification.effort
        self._sampler = StudySampler(
            self.space,
            SAMPLERS[self.effort.sampler],
            self.effort.seed,
            list(self.starts.values()),
        )
        # Check that space and evaluator match
        table = self.space.table
        check_grid(
            f"the density table '{table.name}'",
            table.heads_per_layer,
            "the recipe's model",
            evaluator.shape.heads_per_layer,
            "give the recipe of that model",
        )
        if evaluator.evaluation_tokens.sum() == 0:
            raise UserError(
                "no held-out document is left to evaluate full retrainings on: lower "
                "--max-tokens, or give more text"
            )
        # Open the storage
        if storage is None:
            folder.mkdir(parents=True, exist_ok=True)
        self._storage = open_storage(storage or f"sqlite:///{folder / 'study.db'}")

    def run(self) -> list[Trial]:
        """Score until all trials are finished, then retrain; return all. Raises ``UserError`` for a damaged study."""
        with storage_errors():
            trials = self._score()
            if not self.effort.num_retrained:
                return trials
            return self._retrain(trials, self.promoted(trials))

    def _score(self) -> list[Trial]:
        """Work on the zero-shot study until it is finished; return baselines and trials."""
        # Open the study and run its free trials
        total = self.effort.trials
        name = f"{self.effort.sampler}-{self.effort.seed}"
        metrics = ["zero-shot ΔNLL, %"]
        if self.cost is not None:
            metrics.append(self.cost.name)
        study = open_study(self._storage, f"{self._name}/{name}", self._settings(), metrics)
        self._reporter.reused(len(finished(study, total)), total, "searched layouts")
        with self._reporter.bar("scoring layouts", "layouts") as progress:
            done = work(
                study,
                total,
                lambda trial, index: self._run(study, trial, index),
                progress,
                self._sampler.first_of_round,
            )
        # Baselines are scored by every worker; the evaluator keeps their scores
        baselines = list({**self.starts, **self.others}.values())
        scores = self.evaluator.score(baselines)
        trials = []
        for number, (layout, score) in enumerate(zip(baselines, scores, strict=True)):
            trials.append(self._trial(BASELINE, number, layout, score))
        return [*trials, *(self._read(study, trial) for trial in done.values())]

    def _run(self, study: optuna.Study, trial: optuna.Trial, index: int) -> list[float]:
        """Sample and score the layout of a task, and return its objectives."""
        earlier = finished(study, self._sampler.first_of_round(index)).values()
        layout = self._sampler.layout(index, [self._read(study, trial) for trial in earlier])
        score = self.evaluator.score([layout])[0]
        error = None if math.isnan(score.standard_error) else score.standard_error
        values = self._trial(self.effort.sampler, index, layout, score).values
        # Optuna would take NaN for a failure
        values = [math.inf if math.isnan(value) else float(value) for value in values]
        rows = " ".join(layout.heads)
        trial.set_user_attr(_SCORE, [rows, error, _hash([index, rows, values, error])])
        return values

    def _read(self, study: optuna.Study, trial: FrozenTrial) -> Trial:
        """Return a scored trial. Raises ``UserError`` if it is damaged."""
        try:
            rows, error, digest = trial.user_attrs[_SCORE]
            index = trial.user_attrs[INDEX]
            # Databases have no checksums
            if digest != _hash([index, rows, trial.values, error]):
                raise ValueError("its score has changed")
            standard_error = math.nan if error is None else float(error)
            score = PairedDifference(float(trial.values[0]), standard_error)
            layout = Layout(
                tuple(rows.split(" ")), self.space.window, "search", sinks=self.space.sinks
            )
            return self._trial(self.effort.sampler, index, layout, score)
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"trial {trial.number} of the study '{study.study_name}' is damaged: "
                f"{first_line(error)}\n"
                "search under another --name: scores and retrained checkpoints are reused"
            ) from error

    def _trial(self, sampler: str, number: int, layout: Layout, score: PairedDifference) -> Trial:
        """Return a trial without retrainings."""
        return Trial(
            sampler=sampler,
            seed=0 if sampler == BASELINE else self.effort.seed,
            number=number,
            layout=layout,
            cost=None if self.cost is None else self.cost.of(layout),
            zero_shot=score,
        )

    def _settings(self) -> dict[str, Any]:
        """Return all that scores depend on, so that a study with other settings is refused."""
        space = self.space
        return {
            "probe": f"{space.table.name} {_hash(space.table.density.round(6).tolist())}",
            "budget": list(space.budgets),
            "window": [space.window, space.sinks],
            "constraints": dict(space.constraints.named),
            "start": [layout.hash for layout in self.starts.values()],
            "objective": ["nll", *([] if self.cost is None else [self.cost.name])],
            "checkpoint or text": self.evaluator.identity,
            **vars(SAMPLERS[self.effort.sampler]),  # its options
        }

    def promoted(self, trials: Sequence[Trial]) -> list[Layout]:
        """Return the layouts to retrain: the best start, those to compare with, and the best of the others.

        They are ordered by change of NLL; with a cost, the best others by successive Pareto fronts.
        """
        chosen = {layout.content_hash: layout for layout in self._unpruned(trials)}
        searched = distinct(
            [
                trial
                for trial in trials
                if trial.sampler != BASELINE and trial.layout.content_hash not in chosen
            ]
        )
        if not searched:
            return list(chosen.values())
        order = ranked(np.array([trial.values for trial in searched]))
        best = [searched[index].layout for index in order[: self.effort.num_retrained]]
        return [*chosen.values(), *best]

    def _unpruned(self, trials: Sequence[Trial]) -> list[Layout]:
        """Return the layouts that are retrained in any case: the best start, and those to compare with."""
        start = best_start(trials, self.starts)
        others = list(self.others.values())
        return others if start is None else [start.layout, *others]

    def _retrain(self, trials: Sequence[Trial], layouts: Sequence[Layout]) -> list[Trial]:
        """Work on the retrainings of layouts until all are finished; return the trials with their results."""
        never_pruned = {layout.content_hash for layout in self._unpruned(trials)}
        # Open the study of these retrainings
        names = [self.evaluator.run_name(layout) for layout in (None, *layouts)]
        study = open_study(
            self._storage, f"{self._name}/retrained-{_hash(names)}", {"runs": names}, ["ΔNLL, %"]
        )
        self._reporter.reused(len(finished(study, len(layouts))), len(layouts), "retrainings")

        def run(trial: optuna.Trial, index: int) -> list[float]:
            """Run one task: retrain a layout."""
            layout = layouts[index]
            title = f"{layout.strategy} {layout.hash} ({index + 1} of {len(layouts)})"
            is_prunable = layout.content_hash not in never_pruned
            return [self._retrain_layout(trial, layout, title, is_prunable=is_prunable)]

        done = work(study, len(layouts), run)
        # Add the results to the trials
        complete = [
            layouts[index] for index, trial in done.items() if trial.state == TrialState.COMPLETE
        ]
        short = self._changes("short", layouts)
        full = self._changes("full", complete)
        return [
            replace(
                trial,
                short=short.get(trial.layout.content_hash),
                full=full.get(trial.layout.content_hash),
            )
            for trial in trials
        ]

    def _retrain_layout(
        self, trial: optuna.Trial, layout: Layout, title: str, *, is_prunable: bool
    ) -> float:
        """Retrain a layout and the control briefly, and in full unless the layout is pruned; return its change of NLL.

        The change is in percent. Raises ``TrialPruned``, and ``UserError`` for a retraining without an NLL.
        """
        percent = math.nan
        for step, fidelity in enumerate(get_args(Retraining)):
            self.evaluator.retrain(fidelity, None)
            self._reporter.announce(f"{fidelity} retraining: {title}")
            self.evaluator.retrain(fidelity, layout)
            percent = self.evaluator.retrained(fidelity, [layout])[0].percent
            # Optuna would record NaN as failed, so that the task would be free again
            if math.isnan(percent):
                raise UserError(
                    f"the {fidelity} retraining of {layout.strategy} {layout.hash} has no NLL: "
                    "remove its folder"
                )
            trial.report(percent, step)
            if fidelity == "short" and is_prunable and trial.should_prune():
                raise optuna.TrialPruned
        return percent

    def _changes(
        self, fidelity: Retraining, layouts: Sequence[Layout]
    ) -> dict[str, PairedDifference]:
        """Return the change of NLL of each retrained layout, by content hash."""
        changes = self.evaluator.retrained(fidelity, layouts)
        hashes = [layout.content_hash for layout in layouts]
        return dict(zip(hashes, changes, strict=True))


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
