"""Search from Python: a study of layouts on a model in memory, scored without training.

A study samples the layouts that ``spkv-nas search`` would sample, without its database, workers and retraining::

    from spkv_nas.contrib.search.study import search_layouts

    study = search_layouts(model, blocks, table, budget="25%", trials=100, callbacks=[show])
    study.best_layout, study.trials
    study.optimize(50)                           # continue

As in Optuna, callbacks are called with the study and each finished trial, and may call ``study.stop()``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import get_args

import pandas as pd
from transformers import PreTrainedModel

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import Retraining
from spkv_nas.base import arguments, errors
from spkv_nas.base.progress import LOGGER
from spkv_nas.contrib.search.sampler import (
    SAMPLERS,
    TRIALS_PER_ROUND,
    Effort,
    Sampler,
    StudySampler,
)
from spkv_nas.contrib.search.space import (
    LayoutCost,
    Space,
    Trial,
    front,
    result_table,
    starting_layouts,
)
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import paired, zero_shot
from spkv_nas.model.windows import default_window
from spkv_nas.proposal.budget import is_several, parse_budget, parse_budgets
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.stages.python_api import public

Callback = Callable[["Study", Trial], object]


class Study:
    """A search in one process, running or finished; the same arguments give the same trials.

    Args:
        score: returns the change of NLL of each layout, in order.
        starts: layouts of the space to try first, by name.
        cost: a second objective to minimise; ``front`` then trades off both.

    Raises ``UserError``: the sampler is unknown.
    """

    def __init__(
        self,
        space: Space,
        score: Callable[[Sequence[Layout]], list[paired.PairedDifference]],
        starts: Mapping[str, Layout],
        *,
        sampler: str | Sampler = Effort.sampler,
        seed: int = 0,
        cost: LayoutCost | None = None,
    ) -> None:
        """Create a study without trials; ``optimize`` runs it."""
        self._space = space
        self._score = score
        self._cost = cost
        chosen = SAMPLERS[sampler]
        self._kind = chosen.name
        self._seed = seed
        self._sampler = StudySampler(space, chosen, seed, list(starts.values()))
        self._finished: list[Trial] = []
        # By content hash; may include layouts scored but not tried because of a stop
        self._scores: dict[str, paired.PairedDifference] = {}
        self._goal = 0

    def optimize(self, num_trials: int, callbacks: Sequence[Callback] = ()) -> "Study":
        """Try ``num_trials`` more layouts; ``callbacks`` get the study and each finished one. Return the study."""
        self._goal = len(self._finished) + arguments.convert("num_trials", int, num_trials)
        while len(self._finished) < self._goal:
            # Sample the layouts that do not depend on each other's results, to the end of the round
            number = len(self._finished)
            start = self._sampler.first_of_round(number)
            numbers = range(number, min(self._goal, start + TRIALS_PER_ROUND))
            layouts = [self._sampler.layout(index, self._finished[:start]) for index in numbers]
            self._score_new(layouts)
            # Record the trials and call back, which may stop the study
            for layout in layouts:
                trial = self._trial(layout)
                self._finished.append(trial)
                for callback in callbacks:
                    callback(self, trial)
                if len(self._finished) >= self._goal:
                    break
        return self

    def _score_new(self, layouts: Sequence[Layout]) -> None:
        """Score the layouts that have no score yet together, because they share layers."""
        new = [layout for layout in layouts if layout.content_hash not in self._scores]
        if not new:
            return
        for layout, score in zip(new, self._score(new), strict=True):
            self._scores[layout.content_hash] = score

    def _trial(self, layout: Layout) -> Trial:
        """Return the next trial, of a layout that has a score."""
        return Trial(
            sampler=self._kind,
            seed=self._seed,
            number=len(self._finished),
            layout=layout,
            cost=None if self._cost is None else self._cost.of(layout),
            zero_shot=self._scores[layout.content_hash],
        )

    def stop(self) -> None:
        """Stop ``optimize`` after the current trial; to be called by a callback."""
        self._goal = len(self._finished)

    @property
    def trials(self) -> pd.DataFrame:
        """Return one row per trial, as in ``search.csv``: name, heads, ΔNLL against full attention in %, its error."""
        rows = result_table(self._finished, self._space.table)
        return rows.drop(columns=[name for name in rows if name.startswith(get_args(Retraining))])

    @property
    def best_trial(self) -> Trial:
        """Return the trial with the lowest NLL. Raises ``UserError`` if there are no trials yet."""
        if not self._finished:
            raise errors.UserError("the study has no trials yet: call optimize(num_trials)")
        return min(self._finished, key=lambda trial: trial.zero_shot.percent)

    @property
    def best_layout(self) -> Layout:
        """Return the layout of ``best_trial``, named after the trial."""
        return replace(self.best_trial.layout, strategy=self.best_trial.name)

    @property
    def front(self) -> list[Trial]:
        """Return the Pareto front of NLL and cost, lowest NLL first; without a cost, the best trial."""
        return front(self._finished)


@public
def search_layouts(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    table: HeadScores,
    budget: int | str | None = None,
    *,
    trials: int = 100,
    window: int | None = None,
    sampler: str | Sampler = Effort.sampler,
    seed: int = 0,
    starts: Mapping[str, Layout] | None = None,
    cost: LayoutCost | None = None,
    batch_size: int = 8,
    callbacks: Sequence[Callback] = (),
) -> Study:
    """Search for layouts of ``model`` that lose little NLL without training; return the study, which can continue.

    Args:
        model: dense, hybrid or gated model; it is left unchanged.
        blocks: text to select on. The best score is biased by selection: score the winner again on other text.
        table: head scores that guide the sampler, such as ``head_gates`` gives.
        budget: global KV heads, as a number, a share such as "25%", or a range such as "12..24"; by default the
            number that the table was learned for, or the paper's share.
        trials: layouts to try; 0 returns a study to call ``optimize`` on.
        window: tokens visible to local heads, the query's own included; by default the table's, or ``default_window``.
        sampler: name of one of ``search.sampler.SAMPLERS``: "surrogate" or "random"; or a sampler.
        seed: random seed; equal seeds give equal trials.
        starts: layouts to try first, by name; by default those of the proposal strategies.
        cost: second objective.
        batch_size: micro-batch size in blocks.
        callbacks: called with the study and each finished trial.

    Raises:
        UserError: the budget, the sampler or a table does not fit, a start breaks the budget, or there is no text.
    """
    # Define the search space
    budget = table.record.budget if budget is None else budget
    number = table.num_candidates
    budgets = (
        parse_budgets(str(budget), number) if is_several(budget) else [parse_budget(budget, number)]
    )
    window = window or table.window or default_window(model, blocks.block_size)
    space = Space(table, (budgets[0], budgets[-1]), window, Constraints().on(table))
    space.check()
    # Choose and check the starts
    first = starting_layouts(space, budgets) if starts is None else starts
    for name, layout in first.items():
        if not space.contains(layout):
            raise errors.UserError(
                f"starting layout '{name}' is outside the search space: its layers, heads, budget, "
                "window or sinks differ"
            )

    # Run the trials
    scorer = _scorer(model, blocks, batch_size)
    study = Study(space, scorer, first, sampler=sampler, seed=seed, cost=cost)
    return study.optimize(trials, callbacks)


def _scorer(
    model: PreTrainedModel, blocks: TokenBlocks, batch_size: int
) -> Callable[[Sequence[Layout]], list[paired.PairedDifference]]:
    """Return the function that scores layouts against full attention, which is scored once."""

    @cache
    def full_attention() -> paired.DocumentNLL:
        return zero_shot.zero_shot(model, [None], blocks, batch_size=batch_size)[0]

    def score(layouts: Sequence[Layout]) -> list[paired.PairedDifference]:
        document_nlls = zero_shot.zero_shot(model, layouts, blocks, batch_size=batch_size)
        changes = [paired.paired_difference(nll, full_attention()) for nll in document_nlls]
        best = min(change.percent for change in changes)
        LOGGER.info(f"scored {len(changes)} layouts, the best at {best:+.2f} %")
        return changes

    return score
