"""The choice of global heads as a mixed-integer linear program, solved by HiGHS through ``scipy.optimize.milp``.

Every head is a 0/1 variable. Density coverage (SP-KV paper, "Designing Stronger Hybrids") is linear in them, and so is
every constraint. Ties go to more heads, then to earlier layers and heads, so that without constraints the optimum is
the strategy ``densest``.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import scipy  # whose parts are imported when they are used: most proposals solve nothing
from numpy.typing import NDArray

from spkv_nas.artifacts.grid import Grid
from spkv_nas.base.errors import UserError

Float = NDArray[np.float64]
Rows = tuple[Any, Any, Any]  # low <= A v <= high, A sparse

TIME_LIMIT = 60.0  # seconds per solve; what is not proven by then says how far from the best it may be
_SCALE = 1e6  # of coverage, because HiGHS stops at an absolute gap of 1e-6
_SLACK = 1e-4  # by which rounding may miss a row
_TIE = 1e-5  # of the scaled coverage, below which two layouts tie
_ROBUST_TIE = 1e-5  # weight of the overall coverage beside the worst domain's


@dataclass(frozen=True)
class Solution:
    """bool [L, Hkv], true for global; ``gap`` is how far the objective may be below the best, as a share of it."""

    mask: NDArray[np.bool_]
    gap: float


class Problem:
    """Constraints and budget on one grid, for any densities.

    Args:
        grid: (L, Hkv).
        constraints: by name, those of ``Constraints`` that are set.
        budget: the most that the global heads may weigh.
        weights: [L, Hkv], above 0; None: 1 for every head.
        excluded: bool [L, Hkv], layouts that are not wanted.
        at_least: the least number of global heads.

    With ``uniform``, every number of heads in a mixed layer is a program of its own (``_Program``), tried in the order
    of what its relaxation promises.
    """

    def __init__(
        self,
        grid: Grid,
        constraints: Mapping[str, Any],
        budget: float,
        weights: Float | None = None,
        excluded: Sequence[NDArray[np.bool_]] = (),
        at_least: int = 0,
    ) -> None:
        self._grid, self._constraints, self._budget = grid, dict(constraints), budget
        self._excluded, self._at_least = [mask.ravel() for mask in excluded], at_least
        self._counts = weights is None
        self._weights = np.ones(grid) if weights is None else weights

    def optimum(self, density: Float, *, gap: float = 0.0, time_limit: float = TIME_LIMIT) -> Solution | None:
        """The best layout for densities [P, L, Hkv], of whose coverages the lowest counts; None if none is feasible.

        Args:
            gap: share of the best value within which to stop; above 0, ties are left as they come.
            time_limit: seconds per program.

        Raises:
            UserError: no layout was found within the time limit.
        """
        gain = _SCALE * density.reshape(len(density), -1) / density.sum((1, 2))[:, None]
        breaks_ties = self._counts and len(gain) == 1 and gap == 0.0
        programs = self._programs(self._constraints)
        bounds = [np.inf]
        if len(programs) > 1:
            relaxed = [program.best(gain, relax=True) for program in programs]
            bounds = [-np.inf if one is None else one.value for one in relaxed]
        best: _Optimum | None = None
        reach = 0.0  # what the best may be worth
        for index in np.argsort(bounds, kind="stable")[::-1]:
            if best is not None and bounds[index] < best.value - _TIE:
                break
            own = programs[index].best(gain, gap=gap, time_limit=time_limit)
            if own is None:
                continue
            reach = max(reach, own.value * (1 + own.gap))
            if best is None or own.value >= best.value - _TIE:
                own = programs[index].tie_broken(gain, own) if breaks_ties else own
                best = own if best is None else max(best, own, key=_Optimum.rank)
        if best is None:
            return None
        return Solution(best.mask.reshape(self._grid), max(0.0, reach / best.value - 1) if best.value else 0.0)

    def least(self, *, nonempty: bool = False) -> float | None:
        """The least weight of a layout under the constraints, the budget aside; None if there is none."""
        return self._least(self._constraints, nonempty=nonempty)

    def conflict(self) -> list[str]:
        """Names of constraints that exclude each other, of all such sets a smallest: with any one of them left out,
        some layout meets the others.

        Sets are tried by their size. To leave out one constraint after another would not do, because a constraint may
        also loosen another one: a layer that is named all global or all local has no least or largest number of heads.
        """
        names = [*self._constraints, "budget"]
        weights: dict[frozenset[str], float | None] = {}
        for size in range(1, len(names) + 1):
            for chosen in combinations(names, size):
                layers = frozenset(chosen) - {"budget"}
                if layers not in weights:
                    weights[layers] = self._least({name: self._constraints[name] for name in layers})
                least = weights[layers]
                if least is None or ("budget" in chosen and least > self._budget * (1 + 1e-9)):
                    return sorted(chosen, key=["budget", *self._constraints].index)
        raise AssertionError("the constraints do not exclude each other")

    def _least(self, constraints: Mapping[str, Any], *, nonempty: bool = False) -> float | None:
        gain = -self._weights.reshape(1, -1)
        layouts = [program.best(gain, nonempty=nonempty) for program in self._programs(constraints, budget=False)]
        return min((-layout.value for layout in layouts if layout is not None), default=None)

    def _programs(self, constraints: Mapping[str, Any], *, budget: bool = True) -> list[_Program]:
        heads = self._grid[1]
        mixes = constraints.get("uniform") and constraints.get("granularity") != "layer" and heads > 1
        limit = self._budget if budget else np.inf
        numbers = range(1, heads) if mixes else [None]
        programs = [_Program(self._grid, constraints, limit, self._weights, number) for number in numbers]
        for program in programs:
            program.restrict(self._excluded, self._at_least)
        return programs


@dataclass(frozen=True)
class _Optimum:
    """The best vector of one program."""

    value: float  # of the objective
    mask: NDArray[np.bool_]  # [L * Hkv]
    gap: float

    def rank(self) -> tuple[float, float]:
        """Of several, the largest is the best: by value, then more heads and earlier ones."""
        return round(self.value / _TIE), float(self.mask @ _places(self.mask.size))


class _Program:
    """One linear program. Variables: every head; with ``mixed``, every layer's "all global" and its "mixed"; last,
    the lowest coverage of a domain."""

    def __init__(
        self,
        grid: Grid,
        constraints: Mapping[str, Any],
        budget: float,
        weights: Float,
        mixed: int | None,
    ) -> None:
        layers, heads = grid
        self._grid, self._mixed, self._equal_weights = grid, mixed, bool((weights == weights.flat[0]).all())
        self._num_heads = layers * heads
        self._width = self._num_heads + (0 if mixed is None else 2 * layers) + 1
        self._lower, self._upper = np.zeros(self._width), np.ones(self._width)
        self._upper[-1] = _SCALE
        for layer in constraints.get("global_layers", ()):
            self._lower[layer * heads : (layer + 1) * heads] = 1.0
        for layer in constraints.get("local_layers", ()):
            self._upper[layer * heads : (layer + 1) * heads] = 0.0
        self._rows = list(self._layer_rows(grid, constraints))
        if mixed is not None:
            self._rows += self._uniform_rows(grid, mixed)
        if np.isfinite(budget):
            unit = float(weights.max())  # HiGHS meets a row to 1e-6
            self._rows.append((self._wide(weights.reshape(1, -1) / unit), -np.inf, budget / unit))
        self._excludes = False

    def restrict(self, excluded: Sequence[NDArray[np.bool_]], at_least: int) -> None:
        """Leave out the layouts ``excluded`` [L * Hkv], and those of fewer than ``at_least`` global heads."""
        if excluded:  # of a layout's global heads less the other heads, every other layout has fewer
            masks = np.stack(excluded)
            self._rows.append((self._wide(np.where(masks, 1.0, -1.0)), -np.inf, masks.sum(1) - 1.0))
            self._excludes = True
        if at_least:
            self._rows.append((self._wide(np.ones((1, self._num_heads))), at_least, np.inf))

    def best(
        self,
        gain: Float,
        *,
        relax: bool = False,
        nonempty: bool = False,
        gap: float = 0.0,
        time_limit: float = TIME_LIMIT,
    ) -> _Optimum | None:
        """The best vector for gains [P, L * Hkv], of whose sums the lowest counts; None if none is feasible."""
        rows = self._rows + self._densest_first(gain)
        cost = np.zeros(self._width)
        if len(gain) == 1:
            cost[: self._num_heads] = -gain[0]
        else:
            cost[: self._num_heads] = -_ROBUST_TIE * gain.mean(0)
            cost[-1] = -1.0
            above = np.hstack([gain, np.zeros((len(gain), self._width - self._num_heads))])
            above[:, -1] = -1.0
            rows.append((scipy.sparse.csr_array(above), 0.0, np.inf))
        if nonempty:
            rows.append((self._wide(np.ones((1, self._num_heads))), 1.0, np.inf))
        best = self._run(cost, rows, relax=relax, gap=gap, time_limit=time_limit)
        if best is None or relax or gap > 0.0 or self._mixed is None or len(gain) == 1:
            return best
        try:  # presolve has called a worse point the best, of such programs (reports/LOG.md)
            again = self._run(cost, rows, time_limit=time_limit, presolves=(False,))
        except UserError:  # none in time: the relaxation says how far from the best it may be
            bound = self._run(cost, rows, relax=True)
            return best if bound is None or best.value <= 0 else replace(best, gap=bound.value / best.value - 1)
        return best if again is None else max(best, again, key=lambda one: one.value)

    def tie_broken(self, gain: Float, best: _Optimum) -> _Optimum:
        """Among the layouts as good as ``best`` for gains [1, L * Hkv], the one with more heads and earlier ones."""
        cost = np.zeros(self._width)
        cost[: self._num_heads] = -_places(self._num_heads)
        as_good = (self._wide(gain), float(gain[0] @ best.mask) - _TIE, np.inf)
        again = self._run(cost, [*self._rows, *self._densest_first(gain), as_good])
        return best if again is None else _Optimum(best.value, again.mask, best.gap)

    def _run(
        self,
        cost: Float,
        rows: list[Rows],
        *,
        relax: bool = False,
        gap: float = 0.0,
        time_limit: float = TIME_LIMIT,
        presolves: Sequence[bool] = (True, False),
    ) -> _Optimum | None:
        """The best vector; with each of ``presolves`` in turn, until a point is feasible as HiGHS says."""
        integrality = np.zeros(self._width) if relax else np.ones(self._width)
        integrality[-1] = 0
        for presolve in presolves:  # presolve has called infeasible points optimal (scipy issue 24141)
            with _silenced():
                result = scipy.optimize.milp(
                    cost,
                    constraints=[scipy.optimize.LinearConstraint(*row) for row in rows],
                    bounds=scipy.optimize.Bounds(self._lower, self._upper),
                    integrality=integrality,
                    options={"mip_rel_gap": gap, "time_limit": time_limit, "presolve": presolve},
                )
            if result.x is None:
                if result.status == 1:
                    raise UserError(f"no layout found in {time_limit:g} s: loosen the constraints")
                return None
            point = np.where(integrality > 0, np.rint(result.x), result.x)
            if all(((low - _SLACK <= a @ point) & (a @ point <= high + _SLACK)).all() for a, low, high in rows):
                break
        else:
            raise AssertionError("HiGHS returned a point that is not feasible")
        proven = result.status == 0 and gap == 0.0
        left = 0.0 if proven else float(result.mip_gap or 0)
        return _Optimum(-float(result.fun), point[: self._num_heads] > 0.5, left)

    def _layer_rows(self, grid: Grid, constraints: Mapping[str, Any]) -> Iterator[Rows]:
        layers, heads = grid
        fixed = {*constraints.get("global_layers", ()), *constraints.get("local_layers", ())}
        free = [layer for layer in range(layers) if layer not in fixed]
        low, high = constraints.get("min_per_layer"), constraints.get("max_per_layer")
        if free and (low is not None or high is not None):
            count = self._wide(np.kron(np.eye(layers), np.ones(heads))[free])
            yield count, -np.inf if low is None else low, np.inf if high is None else high
        if constraints.get("granularity") == "layer":
            first = np.repeat(np.arange(0, self._num_heads, heads), heads)
            one = np.eye(self._num_heads)
            yield self._wide(one - one[first]), 0.0, 0.0

    def _uniform_rows(self, grid: Grid, mixed: int) -> list[Rows]:
        """A layer has all heads global, or ``mixed``, or none: the convex hull of these three."""
        layers, heads = grid
        of_layer = np.kron(np.eye(layers), np.ones((heads, 1)))  # [L * Hkv, L]
        head, layer = np.eye(self._num_heads), np.eye(layers)
        return [
            (self._wide(np.hstack([of_layer.T, -heads * layer, -mixed * layer])), 0.0, 0.0),
            (self._wide(np.hstack([np.zeros((layers, self._num_heads)), layer, layer])), 0.0, 1.0),
            (self._wide(np.hstack([head, -of_layer])), 0.0, np.inf),
            (self._wide(np.hstack([head, -of_layer, -of_layer])), -np.inf, 0.0),
        ]

    def _densest_first(self, gain: Float) -> list[Rows]:
        """A mixed layer takes its heads of highest gain, if all weigh the same: no need to search for which."""
        if self._mixed is None or len(gain) > 1 or not self._equal_weights or self._excludes:
            return []
        rank = np.argsort(np.argsort(-gain.reshape(self._grid), axis=1, kind="stable"), axis=1)
        of_layer = np.kron(np.eye(self._grid[0]), np.ones((self._grid[1], 1)))
        mixed = of_layer * (rank.reshape(-1, 1) < self._mixed)
        return [(self._wide(np.hstack([np.eye(self._num_heads), -of_layer, -mixed])), 0.0, 0.0)]

    def _wide(self, left: NDArray[np.floating[Any]]) -> Any:
        """``left`` as a sparse array, with zeros for the variables to its right."""
        missing = scipy.sparse.csr_array((left.shape[0], self._width - left.shape[1]))
        return scipy.sparse.hstack([scipy.sparse.csr_array(left), missing], format="csr")


def _places(num_heads: int) -> Float:
    """What a head is worth among ties: the earlier the more."""
    return np.arange(num_heads, 0, -1.0)


@contextmanager
def _silenced() -> Iterator[None]:
    """Nothing reaches standard output from C: HiGHS prints a debugging line now and then, whatever its options."""
    try:
        saved = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        if sys.platform != "win32":
            ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nothing)
