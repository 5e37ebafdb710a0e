"""A study in one process, for Python and notebooks: layouts are tried and scored, and the trials are a table.

It draws the layouts that ``spkv-nas search`` would draw, without its database, its workers and its retraining::

    study = spkv_nas.search_layouts(model, blocks, table, budget="25%", trials=100, callbacks=[show])
    study.best_layout, study.trials
    study.optimize(50)                           # goes on

As with Optuna, a callback is called with the study and each finished trial, and may call ``study.stop()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.samplers import SAMPLERS, SURROGATE
from spkv_nas.artifacts.search_table import FIDELITIES
from spkv_nas.base.errors import UserError
from spkv_nas.evaluation.paired import Score
from spkv_nas.search.results import front, result_table
from spkv_nas.search.sampler import Sampler
from spkv_nas.search.space import Space
from spkv_nas.search.trials import GENERATION, LayoutCost, Result, Trial

Callback = Callable[["Study", Trial], object]


class Study:
    """A search that is under way or finished; the same arguments make the same trials.

    Args:
        space: the layouts that may be tried.
        score: changes of NLL by layouts, in order.
        starts: layouts of the space to try first, by name.
        sampler: one of ``SAMPLERS``.
        cost: a second objective; ``front`` then weighs both.

    Raises:
        UserError: the sampler is unknown.
    """

    def __init__(
        self,
        space: Space,
        score: Callable[[Sequence[Layout]], list[Score]],
        starts: Mapping[str, Layout],
        *,
        sampler: str = SURROGATE,
        seed: int = 0,
        cost: LayoutCost | None = None,
    ) -> None:
        if sampler not in SAMPLERS:
            raise UserError(f"sampler '{sampler}' is unknown; there are {', '.join(SAMPLERS)}")
        self._space, self._score, self._cost = space, score, cost
        self._kind, self._seed = sampler, seed
        self._sampler = Sampler(space, sampler, seed, list(starts.values()))
        self._finished: list[Trial] = []
        self._scores: dict[str, Score] = {}  # by content hash, those of trials that a stop left out too
        self._goal = 0

    def optimize(self, num_trials: int, callbacks: Sequence[Callback] = ()) -> Study:
        """Try ``num_trials`` more layouts; return the study.

        Args:
            callbacks: each called with the study and a trial when that is finished.
        """
        self._goal = len(self._finished) + num_trials
        while len(self._finished) < self._goal:
            # Draw the layouts that may know the same results
            layouts = self._next_layouts()
            # Score those that are new, together, because they share layers
            fresh = [layout for layout in layouts if layout.content_hash not in self._scores]
            for layout, score in zip(fresh, self._score(fresh) if fresh else [], strict=True):
                self._scores[layout.content_hash] = score
            # Finish one trial after the other
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
        """End ``optimize`` after this trial; called by a callback."""
        self._goal = len(self._finished)

    def _next_layouts(self) -> list[Layout]:
        """Return the layouts of the next trials, at most to the goal, that need no further results."""
        first = len(self._finished)
        known = [Result(self._space.point(trial.layout), trial.values) for trial in self._finished]
        end = min(self._goal, self._sampler.first_of_generation(first) + GENERATION)
        numbers = [number for number in range(first, end) if self._sampler.known_before(number) <= first]
        return [self._sampler.layout(number, known) for number in numbers]

    @property
    def trials(self) -> pd.DataFrame:
        """One row per trial, as in ``search.csv``: name, heads, ΔNLL against full attention in percent, its error."""
        retrained = [f"{one}_{what}" for one in FIDELITIES[1:] for what in ("delta_percent", "standard_error")]
        return result_table(self._finished, self._space.table).drop(columns=retrained)

    @property
    def best_trial(self) -> Trial:
        """The trial with the lowest NLL. Raises ``UserError``: nothing was tried yet."""
        if not self._finished:
            raise UserError("the study has no trials yet: call optimize(num_trials)")
        return min(self._finished, key=lambda trial: trial.zero_shot.percent)

    @property
    def best_layout(self) -> Layout:
        """The layout of ``best_trial``, under the trial's name."""
        return replace(self.best_trial.layout, strategy=self.best_trial.name)

    @property
    def best_value(self) -> float:
        """The lowest ΔNLL against full attention, in percent. It was chosen for it: score the layout on other text."""
        return self.best_trial.zero_shot.percent

    @property
    def front(self) -> list[Trial]:
        """The trials that no other is better than in both objectives, the lowest NLL first; without a cost the best."""
        return front(self._finished)
