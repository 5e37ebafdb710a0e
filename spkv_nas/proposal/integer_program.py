"""Choose the global heads by a mixed-integer linear program, solved by HiGHS through ``scipy.optimize.milp``.

Every head is a 0/1 variable. Density coverage (SP-KV paper, "Designing Stronger Hybrids") and all constraints are
linear in these variables. Ties go to more heads, then to earlier layers and heads, so without constraints the optimum
equals the strategy ``densest``.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import scipy  # submodules load lazily on use: most proposals solve nothing
from numpy.typing import NDArray

from spkv_nas.artifacts.grid import head_cells
from spkv_nas.base.errors import UserError

Float = NDArray[np.float64]

TIME_LIMIT = 60.0  # seconds per solve; a solution not proven optimal by then reports its gap
_SCALE = 1e6  # factor on coverage, because HiGHS stops at an absolute gap of 1e-6
_SLACK = 1e-4  # tolerance of a row after rounding
_TIE = 1e-5  # difference of scaled coverage below which two layouts tie
_ROBUST_TIE = 1e-5  # weight of the mean coverage in the robust objective, which breaks its ties


class Rows(NamedTuple):
    """Rows of a program: low <= left @ variables <= high."""

    left: Any  # sparse, [rows, variables]
    low: float | Float
    high: float | Float


@dataclass(frozen=True)
class Solution:
    """A bool mask [L, Hkv], true for global, and the relative optimality gap of its objective."""

    mask: NDArray[np.bool_]
    gap: float


class Problem:
    """Constraints and budget on one grid, to be solved for any densities.

    With ``uniform``, each possible number of global heads per mixed layer is a separate program (``_Program``);
    programs are solved in descending order of their relaxed optimum.

    Args:
        heads_per_layer: number of KV heads of every layer; arrays [L, Hkv] are read where layers have heads.
        constraints: the ``Constraints`` that are set, by name.
        budget: maximum total weight of the global heads.
        weights: [L, Hkv], above 0; None for a weight of 1 per head.
        excluded: bool [L, Hkv], layouts to exclude.
        at_least: minimum number of global heads.
        apart: minimum number of heads in which a layout differs from each of ``excluded``.
    """

    def __init__(
        self,
        heads_per_layer: Sequence[int],
        constraints: Mapping[str, Any],
        budget: float,
        weights: Float | None = None,
        excluded: Sequence[NDArray[np.bool_]] = (),
        at_least: int = 0,
        apart: int = 1,
    ) -> None:
        """Store the problem; programs are built when it is solved."""
        self._layers = tuple(heads_per_layer)
        self._constraints = dict(constraints)
        self._budget = budget
        self._is_head = head_cells(heads_per_layer)
        self._excluded = [mask[self._is_head] for mask in excluded]
        self._at_least = at_least
        self._apart = apart
        self._counts = weights is None
        self._weights = np.ones(sum(heads_per_layer)) if weights is None else weights[self._is_head]

    def optimum(self, density: Float, *, gap: float = 0.0) -> Solution | None:
        """Return the optimal layout for the densities; None if none is feasible.

        Args:
            density: [P, L, Hkv], per domain; the lowest of their coverages is maximised.
            gap: relative MIP gap at which to stop; above 0, ties are not broken.

        Raises ``UserError``: no layout was found within ``TIME_LIMIT`` seconds.
        """
        # Scale densities to gains [P, heads]: contributions to coverage
        gain = _SCALE * density[:, self._is_head] / density.sum((1, 2))[:, None]
        breaks_ties = self._counts and len(gain) == 1 and gap == 0.0
        programs = self._programs(self._constraints)
        bounds = _upper_bounds(programs, gain)
        # Solve them, most promising first, until no bound can beat the best solution
        best: _Optimum | None = None
        upper_bound = 0.0
        for index in np.argsort(bounds, kind="stable")[::-1]:
            if best is not None and bounds[index] < best.value - _TIE:
                break
            candidate = programs[index].best(gain, gap=gap)
            if candidate is None:
                continue
            upper_bound = max(upper_bound, candidate.value * (1 + candidate.gap))
            if best is not None and candidate.value < best.value - _TIE:
                continue
            if breaks_ties:
                candidate = programs[index].tie_broken(gain, candidate)
            best = candidate if best is None else max(best, candidate, key=_Optimum.rank)
        if best is None:
            return None
        mask = np.zeros(self._is_head.shape, dtype=np.bool_)
        mask[self._is_head] = best.mask
        gap_left = max(0.0, upper_bound / best.value - 1) if best.value else 0.0
        return Solution(mask, gap_left)

    def least(self, constraints: Mapping[str, Any] | None = None) -> float | None:
        """Return the smallest weight of a layout, whatever the budget, under the problem's constraints, or others.

        None if there is none.
        """
        if constraints is None:
            constraints = self._constraints
        programs = self._programs(constraints, budget=False)
        gain = -self._weights.reshape(1, -1)
        weights = []
        for program in programs:
            layout = program.best(gain)
            if layout is not None:
                weights.append(-layout.value)
        return min(weights, default=None)

    def conflict(self) -> list[str]:
        """Return a smallest set of names of constraints that exclude each other.

        Leaving out any one of them makes the others feasible. Sets are tried by size; dropping one constraint after
        another would not work, because a constraint may also relax another: layers named all global or all local are
        exempt from the minimum and maximum number of heads.
        """
        names = [*self._constraints, "budget"]
        least_weights: dict[frozenset[str], float | None] = {}
        for size in range(1, len(names) + 1):
            for subset in combinations(names, size):
                constraint_names = frozenset(subset) - {"budget"}
                # Compute the smallest weight once per set of constraints
                if constraint_names not in least_weights:
                    some = {name: self._constraints[name] for name in constraint_names}
                    least_weights[constraint_names] = self.least(some)
                least = least_weights[constraint_names]
                limit = self._budget * (1 + 1e-9) if "budget" in subset else np.inf
                if least is None or least > limit:
                    return sorted(subset, key=["budget", *self._constraints].index)
        raise AssertionError("the constraints do not exclude each other")

    def _programs(self, constraints: Mapping[str, Any], *, budget: bool = True) -> "list[_Program]":
        """Build the program, or with ``uniform`` one per number of global heads in a mixed layer."""
        heads = max(self._layers)
        limit = self._budget if budget else np.inf
        mixed_counts: Sequence[int | None] = [None]
        if constraints.get("uniform") and constraints.get("granularity") != "layer" and heads > 1:
            mixed_counts = range(1, heads)
        programs = [
            _Program(self._layers, constraints, limit, self._weights, mixed)
            for mixed in mixed_counts
        ]
        for program in programs:
            program.restrict(self._excluded, self._at_least, self._apart)
        return programs


def _upper_bounds(programs: "Sequence[_Program]", gain: Float) -> list[float]:
    """Return the optimum of each program's relaxation, -inf if it is infeasible; inf for a single program."""
    if len(programs) == 1:
        return [np.inf]
    relaxed = [program.best(gain, relax=True) for program in programs]
    return [-np.inf if solution is None else solution.value for solution in relaxed]


@dataclass(frozen=True)
class _Optimum:
    """The optimal vector of one program."""

    value: float  # objective
    mask: NDArray[np.bool_]  # [heads]
    gap: float

    def rank(self) -> tuple[float, float]:
        """Return a sort key, highest for the best solution: by value, then more and earlier heads."""
        return round(self.value / _TIE), float(self.mask @ _tie_values(self.mask.size))


class _Program:
    """One mixed-integer linear program.

    Variables: one per head; with ``mixed``, two per layer, "all global" and "mixed"; last, the lowest coverage of a
    domain.
    """

    def __init__(
        self,
        heads: Sequence[int],
        constraints: Mapping[str, Any],
        budget: float,
        weights: Float,
        mixed: int | None,
    ) -> None:
        """Build variable bounds and constraint rows for layers of ``heads``; ``mixed`` have so many global ones."""
        # Set bounds: 0 or 1 per head, fixed for layers that are all global or all local
        layers = len(heads)
        self._heads = np.array(heads)
        self._num_heads = sum(heads)
        self._mixed = mixed
        self._equal_weights = bool((weights == weights[0]).all())
        self._layer_of = np.repeat(np.arange(layers), heads)
        self._of_layer = np.eye(layers)[self._layer_of]  # [heads, L]
        self._width = self._num_heads + 1
        if mixed is not None:
            self._width += 2 * layers
        self._lower = np.zeros(self._width)
        self._upper = np.ones(self._width)
        self._upper[-1] = _SCALE
        is_global = np.isin(self._layer_of, constraints.get("global_layers", ()))
        is_local = np.isin(self._layer_of, constraints.get("local_layers", ()))
        self._lower[: self._num_heads][is_global] = 1.0
        self._upper[: self._num_heads][is_local] = 0.0
        # Collect the rows of constraints and budget
        self._rows = list(self._layer_rows(constraints))
        if mixed is not None:
            self._rows += self._uniform_rows(mixed)
        if np.isfinite(budget):
            unit = float(weights.max())  # normalise: HiGHS satisfies a row to 1e-6 only
            total = self._wide(weights.reshape(1, -1) / unit)
            self._rows.append(Rows(total, -np.inf, budget / unit))
        self._excludes = False

    def restrict(self, excluded: Sequence[NDArray[np.bool_]], at_least: int, apart: int) -> None:
        """Exclude layouts near ``excluded`` [heads], and those with fewer than ``at_least`` global heads.

        A layout x is near a layout m if they differ in fewer than ``apart`` heads. Their Hamming distance is linear in
        x: sum(m) - sum(x where m) + sum(x where not m).
        """
        if excluded:
            masks = np.stack(excluded)
            signs = np.where(masks, 1.0, -1.0)
            most = masks.sum(1) - float(apart)
            self._rows.append(Rows(self._wide(signs), -np.inf, most))
            self._excludes = True
        if at_least:
            count = self._wide(np.ones((1, self._num_heads)))
            self._rows.append(Rows(count, at_least, np.inf))

    def best(self, gain: Float, *, relax: bool = False, gap: float = 0.0) -> _Optimum | None:
        """Maximise the lowest of the gains [P, heads] summed over global heads; None if infeasible."""
        # Set up the objective: the single gain, or the lowest of several
        rows = self._rows + self._densest_first(gain)
        cost = np.zeros(self._width)
        if len(gain) == 1:
            cost[: self._num_heads] = -gain[0]
        else:
            cost[: self._num_heads] = -_ROBUST_TIE * gain.mean(0)
            cost[-1] = -1.0
            others = np.zeros((len(gain), self._width - self._num_heads))
            domain_sums = np.hstack([gain, others])
            domain_sums[:, -1] = -1.0
            rows.append(Rows(scipy.sparse.csr_array(domain_sums), 0.0, np.inf))
        best = self._run(cost, rows, relax=relax, gap=gap)
        is_simple = self._mixed is None or len(gain) == 1
        if best is None or relax or gap > 0.0 or is_simple:
            return best
        return self._better_without_presolve(cost, rows, best)

    def _better_without_presolve(self, cost: Float, rows: list[Rows], best: _Optimum) -> _Optimum:
        """Solve again without presolve, which can return a suboptimal point for such programs (reports/LOG.md)."""
        try:
            other = self._run(cost, rows, presolves=(False,))
        except UserError:  # out of time: the relaxation bounds the gap
            bound = self._run(cost, rows, relax=True)
            if bound is None or best.value <= 0:
                return best
            return replace(best, gap=bound.value / best.value - 1)
        if other is None or other.value <= best.value:
            return best
        return other

    def tie_broken(self, gain: Float, best: _Optimum) -> _Optimum:
        """Return, among layouts as good as ``best`` for gains [1, heads], the one with more and earlier heads."""
        cost = np.zeros(self._width)
        cost[: self._num_heads] = -_tie_values(self._num_heads)
        least = float(gain[0] @ best.mask) - _TIE
        as_good = Rows(self._wide(gain), least, np.inf)
        solution = self._run(cost, [*self._rows, *self._densest_first(gain), as_good])
        if solution is None:
            return best
        return replace(best, mask=solution.mask)

    def _run(
        self,
        cost: Float,
        rows: list[Rows],
        *,
        relax: bool = False,
        gap: float = 0.0,
        presolves: Sequence[bool] = (True, False),
    ) -> _Optimum | None:
        """Solve for the vector of lowest ``cost``, without integrality if ``relax``; None if ``rows`` are infeasible.

        Arguments are those of ``minimise``. Raises ``UserError``: no point was found within ``TIME_LIMIT`` seconds.
        """
        integrality = np.zeros(self._width) if relax else np.ones(self._width)
        integrality[-1] = 0
        bounds = scipy.optimize.Bounds(self._lower, self._upper)
        result = minimise(cost, rows, bounds, integrality, gap=gap, presolves=presolves)
        if result.x is None:
            if result.status == 1:
                raise UserError(
                    f"found no layout that meets the constraints within {TIME_LIMIT:g} s: "
                    "loosen them"
                )
            return None
        is_proven = result.status == 0 and gap == 0.0
        gap_left = 0.0 if is_proven else float(result.mip_gap or 0)
        mask = result.x[: self._num_heads] > 0.5
        return _Optimum(-float(result.fun), mask, gap_left)

    def _layer_rows(self, constraints: Mapping[str, Any]) -> Iterator[Rows]:
        """Yield the rows of the minimum and maximum number of heads per layer, and of whole layers."""
        fixed = {*constraints.get("global_layers", ()), *constraints.get("local_layers", ())}
        free = [layer for layer in range(len(self._heads)) if layer not in fixed]
        low = constraints.get("min_per_layer")
        high = constraints.get("max_per_layer")
        # Bound the global heads of every layer that is not fixed
        if free and (low is not None or high is not None):
            count = self._wide(self._of_layer.T[free])
            least = -np.inf if low is None else low
            most = np.inf if high is None else high
            yield Rows(count, least, most)
        # Tie the heads of a layer to its first one
        if constraints.get("granularity") == "layer":
            first_head = np.repeat(self._heads.cumsum() - self._heads, self._heads)
            head = np.eye(self._num_heads)
            yield Rows(self._wide(head - head[first_head]), 0.0, 0.0)

    def _uniform_rows(self, mixed: int) -> list[Rows]:
        """Return rows by which a layer has all, ``mixed`` or no heads global: the convex hull of these cases."""
        of_layer = self._of_layer
        head = np.eye(self._num_heads)
        layer = np.eye(len(self._heads))
        no_head = np.zeros((len(layer), self._num_heads))
        # global heads of a layer = heads * all_global + mixed * is_mixed
        count = np.hstack([of_layer.T, -self._heads * layer, -mixed * layer])
        # a layer is all global, mixed, or neither
        one_case = np.hstack([no_head, layer, layer])
        # all_global implies every head
        all_global = np.hstack([head, -of_layer])
        # a head implies all_global or is_mixed
        implied = np.hstack([head, -of_layer, -of_layer])
        return [
            Rows(self._wide(count), 0.0, 0.0),
            Rows(self._wide(one_case), 0.0, 1.0),
            Rows(self._wide(all_global), 0.0, np.inf),
            Rows(self._wide(implied), -np.inf, 0.0),
        ]

    def _densest_first(self, gain: Float) -> list[Rows]:
        """Return rows by which a mixed layer takes its heads of highest gain, which is optimal for equal weights."""
        if self._mixed is None or len(gain) > 1 or not self._equal_weights or self._excludes:
            return []
        order = np.lexsort((-gain[0], self._layer_of))  # by layer, and in a layer by gain
        first_head = np.repeat(self._heads.cumsum() - self._heads, self._heads)
        rank = np.empty(self._num_heads)
        rank[order] = np.arange(self._num_heads) - first_head
        in_mixed = self._of_layer * (rank[:, None] < self._mixed)
        # A head is global if its layer is, or if its layer is mixed and the head is one of the densest
        choice = np.hstack([np.eye(self._num_heads), -self._of_layer, -in_mixed])
        return [Rows(self._wide(choice), 0.0, 0.0)]

    def _wide(self, left: NDArray[np.floating[Any]]) -> Any:
        """Return ``left`` as a sparse array, padded with zero columns to the number of variables."""
        missing = scipy.sparse.csr_array((left.shape[0], self._width - left.shape[1]))
        return scipy.sparse.hstack([scipy.sparse.csr_array(left), missing], format="csr")


def _tie_values(num_heads: int) -> Float:
    """Return weights [heads] for breaking ties: the earlier a head, the higher."""
    return np.arange(num_heads, 0, -1.0)


def minimise(
    cost: Float,
    rows: Sequence[Rows],
    bounds: Any,
    integrality: Float,
    *,
    gap: float = 0.0,
    presolves: Sequence[bool] = (True, False),
    num_checked: int | None = None,
    slack: float = _SLACK,
) -> Any:
    """Return scipy's result of the program, with integers rounded; its ``x`` is None if no point was found.

    HiGHS's ``presolves`` are tried in turn until the point meets the first ``num_checked`` rows, by default all of
    them, to ``slack``. The relative ``gap`` at which to stop is 0 by default.
    """
    constraints = [scipy.optimize.LinearConstraint(row.left, row.low, row.high) for row in rows]
    # Presolve can return infeasible points as optimal (scipy issue 24141)
    for presolve in presolves:
        options = {"mip_rel_gap": gap, "time_limit": TIME_LIMIT, "presolve": presolve}
        with _silenced():
            result = scipy.optimize.milp(
                cost,
                constraints=constraints,
                bounds=bounds,
                integrality=integrality,
                options=options,
            )
        if result.x is None:
            return result
        # Round, and check the rows ourselves
        result.x = np.where(integrality > 0, np.rint(result.x), result.x)
        if all(_is_met(row, result.x, slack) for row in rows[:num_checked]):
            return result
    raise AssertionError("HiGHS returned a point that is not feasible")


def _is_met(row: Rows, point: Float, slack: float) -> bool:
    """Return whether a point meets rows to ``slack``."""
    values = row.left @ point
    return bool(((row.low - slack <= values) & (values <= row.high + slack)).all())


@contextmanager
def _silenced() -> Iterator[None]:
    """Redirect standard output of C code to the null device: HiGHS prints debug lines regardless of its options."""
    try:
        saved = os.dup(1)
    except OSError:  # no standard output
        yield
        return
    # Redirect the file descriptor, because C code bypasses sys.stdout
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 1)
    try:
        yield
    finally:
        # Flush C's buffer before restoring it
        if sys.platform != "win32":
            ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null_device)
