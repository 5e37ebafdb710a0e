"""Define the search space of layouts.

A study identifies a layout by its point: the rows of letters joined by spaces. ``optimum`` returns the layout of
highest total gain, given a gain per head, by an integer program under budget and constraints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.grid import Grid
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.proposal.constraints import CONSTRAINED, Constraints, solve
from spkv_nas.proposal.integer_program import Problem
from spkv_nas.proposal.propose import layout_by
from spkv_nas.proposal.ranking import densest
from spkv_nas.proposal.registry import STRATEGIES

Float = NDArray[np.float64]

_GAP = 1e-6  # relative MIP gap for the best untried layout: gains are estimates, and do not tie


@dataclass(frozen=True, eq=False)
class Space:
    """The layouts on one grid that meet constraints and budget.

    Attributes:
        table: head densities [L, Hkv].
        budgets: minimum and maximum number of global KV heads; layouts have fewer where constraints cannot reach the
            minimum (whole layers with a budget of 5).
        window: local attention window in tokens.
        constraints: constraints on the layouts; none by default.
        signals: further tables [L, Hkv] that may predict the benefit of global heads.
    """

    table: HeadScores
    budgets: tuple[int, int]
    window: int
    constraints: Constraints = field(default_factory=Constraints)
    signals: tuple[HeadScores, ...] = ()

    def check(self) -> None:
        """Check that constraints are feasible at the smallest and largest budget. Raises ``UserError`` if not."""
        for budget in sorted(set(self.budgets)):
            solve(self.table, budget, self.constraints, window=self.window)

    @property
    def grid(self) -> Grid:
        """Return (L, Hkv)."""
        return self.table.grid

    @property
    def sinks(self) -> int:
        """Return the sink tokens of local heads, which are those of the table."""
        return self.table.sinks

    def layout(self, point: str) -> Layout:
        """Return the layout of a point."""
        return _layout(point, self.window, self.sinks)

    @staticmethod
    def point(layout: Layout) -> str:
        """Return the point of a layout."""
        return " ".join(layout.heads)

    def random(self, generator: np.random.Generator, suggested: NDArray[np.bool_] | None = None) -> Layout:
        """Return a random layout of a random budget with as many of the ``suggested`` heads [L, Hkv] as possible."""
        noise = generator.random(self.grid)
        low, high = self.budgets
        budget = int(generator.integers(low, high + 1))
        return self._best(noise if suggested is None else noise + 3.0 * suggested, budget)

    def optimum(self, gain: Float, budget: int, tried: Collection[tuple[str, ...]] = ()) -> Layout:
        """Return the layout of highest total gain with ``budget`` global heads, among those not in ``tried``.

        If all layouts were tried, the best of them is returned.

        Args:
            gain: [L, Hkv], gain of making each head global, of either sign; it does not influence how many are.
            budget: number of global heads, within ``budgets``.
            tried: ``heads`` of layouts to exclude.
        """
        # Make gains positive, and return the best layout if it is new
        gain = gain - gain.min() + 1e-3 * max(float(np.ptp(gain)), 1e-9)
        best = self._best(gain, budget)
        if best.heads not in tried:
            return best
        # Without constraints, enumerate masks by descending gain
        if not self.constraints.named:
            layouts = (self._with(mask) for mask in descending(gain, budget))
            untried = next((layout for layout in layouts if layout.heads not in tried), None)
            if untried is not None:
                return untried
        # With constraints, exclude the tried layouts from the integer program
        masks = [Layout(heads, self.window).global_mask for heads in tried]
        problem = Problem(self.grid, self.constraints.named, budget, excluded=masks, at_least=self._least)
        solution = problem.optimum(gain[None], gap=_GAP)
        return best if solution is None else self._with(solution.mask)

    def contains(self, layout: Layout) -> bool:
        """Return true if the layout has this grid, window and sinks, meets the constraints and fits the budgets."""
        if layout.global_mask.shape != self.grid or (layout.window, layout.sinks) != (self.window, self.sinks):
            return False
        if not self._least <= layout.num_global <= self.budgets[1]:
            return False
        return not self.constraints.broken_by(layout.global_mask)

    def _best(self, gain: Float, budget: int) -> Layout:
        """Return the layout of highest total gain with at most ``budget`` global heads under the constraints."""
        if self.constraints.named:
            best = Problem(self.grid, self.constraints.named, budget).optimum(np.maximum(gain, 1e-6)[None])
            assert best is not None  # ``check`` solved the smallest budget; larger ones allow more
            mask = best.mask
        else:
            mask = densest(gain, budget)
        return self._with(mask)

    def _with(self, mask: NDArray[np.bool_]) -> Layout:
        """Return the layout of a mask [L, Hkv] with this window and these sinks."""
        return Layout.from_mask(mask, window=self.window, sinks=self.sinks)

    @cached_property
    def _least(self) -> int:
        """Return the smallest number of global heads in a layout of the space."""
        return min(self.budgets[0], self._best(self._rank + 1.0, self.budgets[0]).num_global)

    @cached_property
    def _rank(self) -> Float:
        """Return the density ranks [L, Hkv] in [0, 1]."""
        return ranks(self.table.density)


@lru_cache(1 << 14)
def _layout(point: str, window: int, sinks: int) -> Layout:
    """Return the layout of a point; cached, because every trial is decoded again for each later one."""
    return Layout(tuple(point.split(" ")), window, "search", sinks=sinks)


def descending(gain: Float, budget: int) -> Iterator[NDArray[np.bool_]]:
    """Yield all masks of ``budget`` heads in descending order of total gain, in the shape of ``gain``.

    Each mask follows from an earlier one by replacing a head by the one that gains next less. This avoids integer
    programs, which take seconds to exclude layouts of 640 heads.
    """
    # Start from the heads of highest gain
    order = np.argsort(-gain.ravel(), kind="stable")
    loss = -np.diff(gain.ravel()[order])  # [H - 1], loss of replacing a head by the next one
    start = (np.arange(gain.size) < budget).tobytes()
    heap, visited = [(0.0, start)], {start}
    while heap:
        total_loss, packed = heappop(heap)
        chosen = np.frombuffer(packed, bool)
        yield np.isin(np.arange(gain.size), order[chosen]).reshape(gain.shape)
        # Push the masks that differ by one such step
        for position in np.flatnonzero(chosen[:-1] & ~chosen[1:]):
            successor = chosen.copy()
            successor[position], successor[position + 1] = False, True
            if successor.tobytes() not in visited:
                visited.add(successor.tobytes())
                heappush(heap, (total_loss + loss[position], successor.tobytes()))


def ranks(values: Float) -> Float:
    """Return the ranks of the values in ascending order, scaled to [0, 1], in the shape of ``values``."""
    flat = values.ravel()
    scaled_ranks = np.argsort(np.argsort(flat, kind="stable"), kind="stable") / max(1, flat.size - 1)
    return scaled_ranks.reshape(values.shape)


def starting_layouts(space: Space, budgets: list[int]) -> dict[str, Layout]:
    """Return the layouts of a space to start a search from, by name.

    For a single budget these are the strategies' layouts that meet the constraints; for a range, the best layout at
    each of five budgets.
    """
    table, window = space.table, space.window
    if len(budgets) == 1:
        # Use every strategy for a single budget
        strategies = [strategy for strategy in STRATEGIES if not (strategy.is_control or strategy.is_random)]
        layouts = {strategy.name: layout_by(strategy, table, budgets[0], window=window) for strategy in strategies}
        if space.constraints.named:
            layouts[CONSTRAINED] = solve(table, budgets[0], space.constraints, window=window)
    else:
        # Spread five solutions over a range of budgets
        chosen = sorted({budgets[round(part * (len(budgets) - 1) / 4)] for part in range(5)})
        solved = (solve(table, number, space.constraints, window=window) for number in chosen)
        layouts = {f"densest-{layout.num_global}": layout for layout in solved}
    return {name: replace(layout, strategy=name) for name, layout in layouts.items() if space.contains(layout)}
