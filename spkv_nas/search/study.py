"""Run a search in one process, from Python and notebooks; its trials are available as a table.

A study samples the layouts that ``spkv-nas search`` would sample, without its database, workers and retraining::

    study = spkv_nas.search_layouts(model, blocks, table, budget="25%", trials=100, callbacks=[show])
    study.best_layout, study.trials
    study.optimize(50)                           # continue

As in Optuna, callbacks are called with the study and each finished trial, and may call ``study.stop()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from spkv_nas.artifacts.defaults import SAMPLER
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import FIDELITIES
from spkv_nas.base.arguments import convert
from spkv_nas.base.errors import UserError
from spkv_nas.evaluation.paired import PairedDifference
from spkv_nas.search.registry import SAMPLERS
from spkv_nas.search.results import front, result_table
from spkv_nas.search.sampler import Sampler
from spkv_nas.search.space import Space
from spkv_nas.search.study_sampler import StudySampler
from spkv_nas.search.trials import TRIALS_PER_ROUND, LayoutCost, Result, Trial

Callback = Callable[["Study", Trial], object]


class Study:
    """A search in one process, running or finished; the same arguments give the same trials.

    Args:
        space: the search space.
        score: returns the change of NLL of each layout, in order.
        starts: layouts of the space to try first, by name.
        sampler: one of ``search.registry.SAMPLERS``, by name, or another.
        seed: random seed of the sampler.
        cost: a second objective to minimise; ``front`` then trades off both.

    Raises:
        UserError: the sampler is unknown.
    """

    def __init__(
        self,
        space: Space,
        score: Callable[[Sequence[Layout]], list[PairedDifference]],
        starts: Mapping[str, Layout],
        *,
        sampler: str | Sampler = SAMPLER,
        seed: int = 0,
        cost: LayoutCost | None = None,
    ) -> None:
        """Create a study without trials; ``optimize`` runs it."""
        self._space, self._score, self._cost = space, score, cost
        chosen = SAMPLERS[sampler]
        self._kind, self._seed = chosen.name, seed
        self._sampler = StudySampler(space, chosen, seed, list(starts.values()))
        self._finished: list[Trial] = []
        self._scores: dict[
            str, PairedDifference
        ] = {}  # by content hash; may include layouts scored but not tried because of a stop
        self._goal = 0

    def optimize(self, num_trials: int, callbacks: Sequence[Callback] = ()) -> Study:
        """Try ``num_trials`` more layouts and return the study.

        Args:
            num_trials: number of trials to add.
            callbacks: called with the study and each finished trial.
        """
        self._goal = len(self._finished) + convert("num_trials", int, num_trials)
        while len(self._finished) < self._goal:
            # Sample the layouts that do not depend on each other's results
            layouts = self._next_layouts()
            # Score new ones together, because they share layers
            fresh = [layout for layout in layouts if layout.content_hash not in self._scores]
            for layout, score in zip(fresh, self._score(fresh) if fresh else [], strict=True):
                self._scores[layout.content_hash] = score
            # Record the trials and call back
            for layout in layouts:
                cost = None if self._cost is None else self._cost.of(layout)
                number = len(self._finished)
                trial = Trial(self._kind, self._seed, number, layout, cost, self._scores[layout.content_hash])
                self._finished.append(trial)
                for callback in callbacks:
                    callback(self, trial)
                if len(self._finished) >= self._goal:
                    break  # stopped
        return self

    def stop(self) -> None:
        """Stop ``optimize`` after the current trial; to be called by a callback."""
        self._goal = len(self._finished)

    def _next_layouts(self) -> list[Layout]:
        """Return the layouts of the next trials, to the end of the round or of the requested number."""
        number = len(self._finished)
        first = self._sampler.first_of_round(number)
        results = [Result(self._space.point(trial.layout), trial.values) for trial in self._finished[:first]]
        end = min(self._goal, first + TRIALS_PER_ROUND)
        return [self._sampler.layout(index, results) for index in range(number, end)]

    @property
    def trials(self) -> pd.DataFrame:
        """Return one row per trial, as in ``search.csv``: name, heads, ΔNLL against full attention in %, its error."""
        retrained = [
            f"{fidelity}_{quantity}" for fidelity in FIDELITIES[1:] for quantity in ("delta_percent", "standard_error")
        ]
        return result_table(self._finished, self._space.table).drop(columns=retrained)

    @property
    def best_trial(self) -> Trial:
        """Return the trial with the lowest NLL. Raises ``UserError`` if there are no trials yet."""
        if not self._finished:
            raise UserError("the study has no trials yet: call optimize(num_trials)")
        return min(self._finished, key=lambda trial: trial.zero_shot.percent)

    @property
    def best_layout(self) -> Layout:
        """Return the layout of ``best_trial``, named after the trial."""
        return replace(self.best_trial.layout, strategy=self.best_trial.name)

    @property
    def front(self) -> list[Trial]:
        """Return the Pareto front of NLL and cost, lowest NLL first; without a cost, the best trial."""
        return front(self._finished)
