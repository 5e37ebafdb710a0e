"""The layouts that a search may try; a study knows a layout by its point, the rows of letters as one text.

Whatever heads a sampler wishes for are made a layout of the space by ``nearest``: an integer program under budget and
constraints, in which heads that were suggested for come first, and the density decides among the others. ``optimum`` is
the layout that is worth the most by what a sampler thinks of every head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.grid import Grid
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.proposal.constraints import Constraints, solve
from spkv_nas.proposal.integer_program import Problem
from spkv_nas.proposal.strategies import densest

Float = NDArray[np.float64]

_WISHED, _DENSITY, _NOISE = 0.6, 0.2, 0.2  # what decides which heads to take
_GAP = 1e-6  # share of the best gain that the best layout not tried may lack: gains are estimates, and do not tie


@dataclass(frozen=True, eq=False)
class Space:
    """Layouts for one grid under constraints.

    Attributes:
        table: densities [L, Hkv].
        budgets: smallest and largest number of global KV heads; where constraints cannot give so many (whole layers of
            a budget of 5), they leave fewer.
        window: of the local heads.
        constraints: none by default.
        signals: further tables [L, Hkv] that may tell what a head is worth.
    """

    table: HeadScores
    budgets: tuple[int, int]
    window: int
    constraints: Constraints = field(default_factory=Constraints)
    signals: tuple[HeadScores, ...] = ()

    def check(self) -> None:
        """Raises ``UserError`` if no layout meets the constraints at the smallest or the largest budget."""
        for budget in sorted(set(self.budgets)):
            solve(self.table, budget, self.constraints, window=self.window)

    @property
    def grid(self) -> Grid:
        """(L, Hkv)."""
        return self.table.num_layers, self.table.num_kv_heads

    def layout(self, point: str) -> Layout:
        """The layout of a point."""
        return _layout(point, self.window)

    @staticmethod
    def point(layout: Layout) -> str:
        """The point of a layout."""
        return " ".join(layout.heads)

    def nearest(self, suggested: NDArray[np.bool_] | None, budget: int, noise: Float, *, by_density: bool) -> Layout:
        """A layout of the space that has as many of the suggested global heads as it can, and ``budget`` in all.

        Args:
            suggested: [L, Hkv], true for the heads suggested for; None: none is.
            budget: cut to ``budgets``.
            noise: [L, Hkv] in [0, 1], weighs as much as the density, or alone.
            by_density: whether denser heads come first among heads that are equally suggested for.
        """
        gain = _NOISE * noise
        if suggested is not None:
            gain = gain + _WISHED * suggested
        if by_density:
            gain = gain + _DENSITY * self._rank
        return self._best(gain, min(max(budget, self.budgets[0]), self.budgets[1]))

    def optimum(self, gain: Float, budget: int, tried: Collection[tuple[str, ...]] = ()) -> Layout:
        """The layout of the space with ``budget`` heads that gains the most, of those not ``tried`` if any is left.

        Args:
            gain: [L, Hkv], what each head is worth if it is global, of either sign: how many are is not its choice.
            budget: one of ``budgets``.
            tried: ``heads`` of layouts.
        """
        gain = gain - gain.min() + 1e-3 * max(float(np.ptp(gain)), 1e-9)
        best = self._best(gain, budget)
        if best.heads not in tried:
            return best
        if not self.constraints.named:
            layouts = (Layout.from_mask(mask, window=self.window) for mask in descending(gain, budget))
            new = next((layout for layout in layouts if layout.heads not in tried), None)
            if new is not None:
                return new
        masks = [Layout(heads, self.window).global_mask for heads in tried]
        problem = Problem(self.grid, self.constraints.named, budget, excluded=masks, at_least=self._least)
        found = problem.optimum(gain[None], gap=_GAP)
        return best if found is None else Layout.from_mask(found.mask, window=self.window)

    def contains(self, layout: Layout) -> bool:
        """Whether the layout is of this grid and window, meets the constraints and has one of the budgets."""
        if layout.global_mask.shape != self.grid or layout.window != self.window:
            return False
        if not self._least <= layout.num_global <= self.budgets[1]:
            return False
        gain = np.where(layout.global_mask, 1.0, 1e-6)  # the layout itself is the best if it is feasible
        return self._best(gain, layout.num_global).heads == layout.heads

    def _best(self, gain: Float, budget: int) -> Layout:
        if self.constraints.named:
            best = Problem(self.grid, self.constraints.named, budget).optimum(np.maximum(gain, 1e-6)[None])
            assert best is not None  # ``check`` has solved the smallest budget, and a larger one allows more
            mask = best.mask
        else:
            mask = densest(gain, budget)
        return Layout.from_mask(mask, window=self.window)

    @cached_property
    def _least(self) -> int:
        """The smallest number of global heads of a layout of the space."""
        return min(self.budgets[0], self._best(self._rank + 1.0, self.budgets[0]).num_global)

    @cached_property
    def _rank(self) -> Float:
        return ranks(self.table.density)


@lru_cache(1 << 14)
def _layout(point: str, window: int) -> Layout:
    """Kept, because every trial is looked at again by each that comes after it."""
    return Layout(tuple(point.split(" ")), window, "search")


def descending(gain: Float, budget: int) -> Iterator[NDArray[np.bool_]]:
    """All masks of ``budget`` heads, those of the highest total gain first; of the shape of ``gain``.

    What comes next is one of those before with a head replaced by the one that gains next less: no integer program,
    which takes seconds to leave out layouts of 640 heads.
    """
    order = np.argsort(-gain.ravel(), kind="stable")
    loss = -np.diff(gain.ravel()[order])  # [H - 1], of replacing a head by the next
    start = (np.arange(gain.size) < budget).tobytes()
    heap, seen = [(0.0, start)], {start}
    while heap:
        lost, packed = heappop(heap)
        chosen = np.frombuffer(packed, bool)
        yield np.isin(np.arange(gain.size), order[chosen]).reshape(gain.shape)
        for place in np.flatnonzero(chosen[:-1] & ~chosen[1:]):
            new = chosen.copy()
            new[place], new[place + 1] = False, True
            if new.tobytes() not in seen:
                seen.add(new.tobytes())
                heappush(heap, (lost + loss[place], new.tobytes()))


def ranks(values: Float) -> Float:
    """Places of the values in ascending order, in [0, 1]; the shape of ``values``."""
    flat = values.ravel()
    places = np.argsort(np.argsort(flat, kind="stable"), kind="stable") / max(1, flat.size - 1)
    return places.reshape(values.shape)
