"""Define the search space of layouts, the layouts to start from, and the trials of a search."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pandas as pd

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import BASELINE, COLUMNS
from spkv_nas.base.arrays import Float, Mask
from spkv_nas.evaluation.paired import PairedDifference
from spkv_nas.proposal.constraints import CONSTRAINED, Constraints, solve
from spkv_nas.proposal.coverage import coverage
from spkv_nas.proposal.integer_program import Problem
from spkv_nas.proposal.propose import layout_by
from spkv_nas.proposal.strategies import STRATEGIES, densest

_GAP = 1e-6  # relative MIP gap for the best untried layout: gains are estimates, and do not tie


@dataclass(frozen=True, eq=False)
class Space:
    """The layouts on one grid that meet constraints and budget."""

    table: HeadScores  # head densities [L, Hkv]
    budget: int  # number of global KV heads; fewer where constraints allow no more
    window: int  # tokens
    constraints: Constraints = field(default_factory=Constraints)

    def check(self) -> None:
        """Check that constraints are feasible at the budget. Raises ``UserError`` if not."""
        solve(self.table, self.budget, self.constraints, window=self.window)

    @property
    def sinks(self) -> int:
        """Return the sink tokens of local heads, which are those of the table."""
        return self.table.sinks

    def random(self, generator: np.random.Generator) -> Layout:
        """Return a random layout."""
        return self._best(generator.random(self.table.grid))

    def optimum(self, gain: Float, tried: Collection[tuple[str, ...]] = ()) -> Layout:
        """Return the layout of highest total ``gain`` [L, Hkv] that is not in ``tried``.

        Gains may have either sign, which does not influence how many heads are global. If all layouts were tried, the
        best of them is returned.
        """
        # Make gains positive, and return the best layout if it is new
        gain = gain - gain.min() + 1e-3 * max(float(np.ptp(gain)), 1e-9)
        best = self._best(gain)
        if best.heads not in tried:
            return best
        # Exclude the tried layouts; without constraints, take fewer heads only if all of the budget are tried
        masks = [Layout(heads, self.window).global_mask for heads in tried]
        named = self.constraints.named
        for at_least in [self._least] if named else [self.budget, self._least]:
            problem = Problem(
                self.table.heads_per_layer, named, self.budget, excluded=masks, at_least=at_least
            )
            solution = problem.optimum(gain[None], gap=_GAP)
            if solution is not None:
                return self._with(solution.mask)
        return best

    def contains(self, layout: Layout) -> bool:
        """Return true if the layout has this grid, window and sinks, meets the constraints and fits the budget."""
        if layout.windows or (layout.window, layout.sinks) != (self.window, self.sinks):
            return False
        if layout.heads_per_layer != self.table.heads_per_layer:
            return False
        if not self._least <= layout.num_global <= self.budget:
            return False
        return not self.constraints.broken_by(layout)

    def _best(self, gain: Float) -> Layout:
        """Return the layout of highest total gain within the budget under the constraints."""
        if not self.constraints.named:
            return self._with(densest(np.where(self.table.is_head, gain, np.nan), self.budget))
        problem = Problem(self.table.heads_per_layer, self.constraints.named, self.budget)
        best = problem.optimum(np.maximum(gain, 1e-6)[None])
        assert best is not None  # as in ``check``
        return self._with(best.mask)

    def _with(self, mask: Mask) -> Layout:
        """Return the layout of a mask [L, Hkv] with this window and these sinks."""
        return Layout.from_mask(
            mask,
            window=self.window,
            sinks=self.sinks,
            heads_per_layer=self.table.heads_per_layer,
        )

    @cached_property
    def _least(self) -> int:
        """Return the smallest number of global heads in a layout of the space."""
        return min(self.budget, self._best(ranks(self.table.density) + 1.0).num_global)


def ranks(values: Float) -> Float:
    """Return the ranks of the values in ascending order, scaled to [0, 1], in the shape of ``values``."""
    order = np.argsort(values.ravel(), kind="stable")
    number_in_order = np.argsort(order, kind="stable")
    return (number_in_order / max(1, values.size - 1)).reshape(values.shape)


def starting_layouts(space: Space) -> dict[str, Layout]:
    """Return the layouts of the strategies in the space, by name."""
    layouts = {}
    for strategy in STRATEGIES:
        if not strategy.is_control and not strategy.is_random:
            layout = layout_by(strategy, space.table, space.budget, window=space.window)
            layouts[strategy.name] = layout
    if space.constraints.named:
        layout = solve(space.table, space.budget, space.constraints, window=space.window)
        layouts[CONSTRAINED] = layout
    starts = {}
    for name, layout in layouts.items():
        if space.contains(layout):
            starts[name] = replace(layout, strategy=name)
    return starts


@dataclass(frozen=True)
class Trial:
    """A tried layout and its score, the change of NLL against full attention without training."""

    sampler: str
    seed: int
    number: int
    layout: Layout
    zero_shot: PairedDifference

    @property
    def name(self) -> str:
        """Return the name, such as "surrogate-0-17"; for a baseline, the name of its layout."""
        if self.sampler == BASELINE:
            return self.layout.strategy
        return f"{self.sampler}-{self.seed}-{self.number}"

    @property
    def named_layout(self) -> Layout:
        """Return the layout, named after the trial."""
        return replace(self.layout, strategy=self.name)


def best_start(trials: Sequence[Trial], starts: Mapping[str, Layout]) -> Trial | None:
    """Return the baseline with the lowest NLL without training among the layouts that a search starts from."""
    baselines = [
        trial for trial in trials if trial.sampler == BASELINE and trial.layout.strategy in starts
    ]
    return min(baselines, key=lambda trial: trial.zero_shot.percent, default=None)


def result_table(trials: Sequence[Trial], table: HeadScores) -> pd.DataFrame:
    """Tabulate the trials with columns ``COLUMNS``; those of retrainings are NaN, ``heads`` has a word per layer."""
    rows = [
        {
            "name": trial.name,
            "sampler": trial.sampler,
            "seed": trial.seed,
            "trial": trial.number,
            "hash": trial.layout.hash,
            "num_global": trial.layout.num_global,
            "coverage_percent": 100 * coverage(table, trial.layout),
            "zero_shot_delta_percent": trial.zero_shot.percent,
            "zero_shot_standard_error": trial.zero_shot.standard_error,
            "heads": " ".join(trial.layout.heads),
        }
        for trial in trials
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))
