"""Define the search space of layouts, the effort of a search, and its trials with their Pareto order."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import BASELINE, COLUMNS, FIDELITIES
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
    # Smallest and largest number of global KV heads; fewer where constraints allow no more
    budgets: tuple[int, int]
    window: int  # tokens
    constraints: Constraints = field(default_factory=Constraints)

    def check(self) -> None:
        """Check that constraints are feasible at the smallest and largest budget. Raises ``UserError`` if not."""
        for budget in sorted(set(self.budgets)):
            solve(self.table, budget, self.constraints, window=self.window)

    @property
    def sinks(self) -> int:
        """Return the sink tokens of local heads, which are those of the table."""
        return self.table.sinks

    def random(self, generator: np.random.Generator) -> Layout:
        """Return a random layout of a random budget."""
        noise = generator.random(self.table.grid)
        low, high = self.budgets
        return self._best(noise, int(generator.integers(low, high + 1)))

    def optimum(self, gain: Float, budget: int, tried: Collection[tuple[str, ...]] = ()) -> Layout:
        """Return the layout of highest total ``gain`` [L, Hkv] with ``budget`` global heads that is not in ``tried``.

        Gains may have either sign, which does not influence how many heads are global. If all layouts were tried, the
        best of them is returned.
        """
        # Make gains positive, and return the best layout if it is new
        gain = gain - gain.min() + 1e-3 * max(float(np.ptp(gain)), 1e-9)
        best = self._best(gain, budget)
        if best.heads not in tried:
            return best
        # Exclude the tried layouts; without constraints, take fewer heads only if all of the budget are tried
        masks = [Layout(heads, self.window).global_mask for heads in tried]
        named = self.constraints.named
        for at_least in [self._least] if named else [budget, self._least]:
            problem = Problem(
                self.table.heads_per_layer, named, budget, excluded=masks, at_least=at_least
            )
            solution = problem.optimum(gain[None], gap=_GAP)
            if solution is not None:
                return self._with(solution.mask)
        return best

    def contains(self, layout: Layout) -> bool:
        """Return true if the layout has this grid, window and sinks, meets the constraints and fits the budgets."""
        if layout.windows or (layout.window, layout.sinks) != (self.window, self.sinks):
            return False
        if layout.heads_per_layer != self.table.heads_per_layer:
            return False
        if not self._least <= layout.num_global <= self.budgets[1]:
            return False
        return not self.constraints.broken_by(layout)

    def _best(self, gain: Float, budget: int) -> Layout:
        """Return the layout of highest total gain with at most ``budget`` global heads under the constraints."""
        if not self.constraints.named:
            return self._with(densest(np.where(self.table.is_head, gain, np.nan), budget))
        problem = Problem(self.table.heads_per_layer, self.constraints.named, budget)
        best = problem.optimum(np.maximum(gain, 1e-6)[None])
        assert best is not None  # ``check`` solved the smallest budget; larger ones allow more
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
        smallest = self.budgets[0]
        allowed = self._best(ranks(self.table.density) + 1.0, smallest).num_global
        return min(smallest, allowed)


def ranks(values: Float) -> Float:
    """Return the ranks of the values in ascending order, scaled to [0, 1], in the shape of ``values``."""
    order = np.argsort(values.ravel(), kind="stable")
    number_in_order = np.argsort(order, kind="stable")
    return (number_in_order / max(1, values.size - 1)).reshape(values.shape)


def starting_layouts(space: Space, budgets: list[int]) -> dict[str, Layout]:
    """Return the layouts to start from: the strategies' for one budget, the best of five budgets for a range."""
    layouts = _of_strategies(space, budgets[0]) if len(budgets) == 1 else _spread(space, budgets)
    starts = {}
    for name, layout in layouts.items():
        if space.contains(layout):
            starts[name] = replace(layout, strategy=name)
    return starts


def _of_strategies(space: Space, budget: int) -> dict[str, Layout]:
    """Return the layouts of every strategy for one budget."""
    layouts = {}
    for strategy in STRATEGIES:
        if not strategy.is_control and not strategy.is_random:
            layouts[strategy.name] = layout_by(strategy, space.table, budget, window=space.window)
    if space.constraints.named:
        layouts[CONSTRAINED] = solve(space.table, budget, space.constraints, window=space.window)
    return layouts


def _spread(space: Space, budgets: list[int]) -> dict[str, Layout]:
    """Return the best layouts of five budgets, spread over a range."""
    layouts = {}
    for budget in sorted({budgets[round(part * (len(budgets) - 1) / 4)] for part in range(5)}):
        layout = solve(space.table, budget, space.constraints, window=space.window)
        layouts[f"densest-{layout.num_global}"] = layout
    return layouts


@dataclass(frozen=True)
class LayoutCost:
    """A second objective: the cost of a layout, with its name and unit."""

    name: str
    of: Callable[[Layout], float]


@dataclass(frozen=True)
class Trial:
    """A tried layout and its measurements so far; changes of NLL are relative to full attention."""

    sampler: str
    seed: int
    number: int
    layout: Layout
    cost: float | None
    zero_shot: PairedDifference
    short: PairedDifference | None = None
    full: PairedDifference | None = None

    @property
    def name(self) -> str:
        """Return the name, such as "surrogate-0-17"; for a baseline, the name of its layout."""
        if self.sampler == BASELINE:
            return self.layout.strategy
        return f"{self.sampler}-{self.seed}-{self.number}"

    @property
    def values(self) -> list[float]:
        """Return the objectives without training: change of NLL in percent, then the cost if there is one."""
        if self.cost is None:
            return [self.zero_shot.percent]
        return [self.zero_shot.percent, self.cost]


def best_start(trials: Sequence[Trial], starts: Mapping[str, Layout]) -> Trial | None:
    """Return the baseline with the lowest NLL without training among the layouts that a search starts from."""
    baselines = [
        trial for trial in trials if trial.sampler == BASELINE and trial.layout.strategy in starts
    ]
    return min(baselines, key=lambda trial: trial.zero_shot.percent, default=None)


def ranked(values: Float) -> list[int]:
    """Return the row numbers of ``values`` [points, objectives] by successive Pareto fronts, best first."""
    remaining = list(range(len(values)))
    order = []
    while remaining:
        front = [remaining[index] for index in first_front(values[remaining])]
        order += front
        remaining = [index for index in remaining if index not in set(front)]
    return order


def first_front(values: Float) -> list[int]:
    """Return the rows of ``values`` on the Pareto front, sorted by the first objective.

    A row is on the front if no other is at least as good in all objectives and better in one. NaN is worse than any
    number.
    """
    values = np.where(np.isnan(values), np.inf, values)
    rows = values[:, None]
    others = values[None]
    is_dominated = np.all(rows >= others, -1) & np.any(rows > others, -1)
    front: list[int] = np.flatnonzero(~is_dominated.any(1)).tolist()
    return sorted(front, key=lambda index: tuple(values[index]))


def result_table(trials: Sequence[Trial], table: HeadScores) -> pd.DataFrame:
    """Tabulate the trials with columns ``COLUMNS``; unmeasured values are NaN, ``heads`` has a word per layer."""
    rows = []
    for trial in trials:
        row: dict[str, Any] = {
            "name": trial.name,
            "sampler": trial.sampler,
            "seed": trial.seed,
            "trial": trial.number,
            "hash": trial.layout.hash,
            "num_global": trial.layout.num_global,
            "coverage_percent": 100 * coverage(table, trial.layout),
            "cost": math.nan if trial.cost is None else trial.cost,
            "heads": " ".join(trial.layout.heads),
        }
        # Add the change of NLL at every fidelity
        for fidelity in FIDELITIES:
            change = getattr(trial, fidelity) or PairedDifference(math.nan, math.nan)
            row[f"{fidelity}_delta_percent"] = change.percent
            row[f"{fidelity}_standard_error"] = change.standard_error
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def front(trials: Sequence[Trial]) -> list[Trial]:
    """Return the distinct trials on the Pareto front of the zero-shot objectives, lowest NLL first."""
    candidates = distinct(trials)[::-1]
    values = np.array([trial.values for trial in candidates])
    return [candidates[index] for index in first_front(values)]


def distinct(trials: Sequence[Trial]) -> list[Trial]:
    """Return the first trial of each layout, in order of their last ones."""
    first_trials = {trial.layout.content_hash: trial for trial in reversed(trials)}
    return list(first_trials.values())[::-1]
