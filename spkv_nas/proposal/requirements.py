"""What an architect requires of a proposal beside its budget: constraints, weights, a memory limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.base.units import format_bytes, parse_bytes
from spkv_nas.cost.cache_memory import CacheCost
from spkv_nas.proposal.budget import is_several, parse_budget
from spkv_nas.proposal.constraints import Constraints, option_name, read_weights, solve
from spkv_nas.proposal.integer_program import Problem
from spkv_nas.proposal.propose import MATCH_BUDGET
from spkv_nas.proposal.stability import Bootstrap

Float = NDArray[np.float64]
_RESAMPLE_GAP, _ROUGH_GAP = 1e-4, 1e-3  # share of the best within which a resample is solved; if robust, and large
_LARGE = 200  # heads


@dataclass(frozen=True)
class Requirements:
    """The options of ``propose`` that go beyond its budget; see ``spkv-nas propose --help``.

    Attributes:
        constraints: what the layout has to meet.
        robust: maximise the coverage of the domain whose coverage is lowest.
        weights: file of what every global head weighs, in place of 1.
        kv_bytes: memory for keys and values such as "2GiB", in place of a budget; needs ``context``.
        context: tokens per sequence.
        batch: sequences held at once.
        head_dim, kv_dtype: of the cache; the probe's by default.
    """

    constraints: Constraints = field(default_factory=Constraints)
    robust: bool = False
    weights: Path | None = None
    kv_bytes: str | None = None
    context: int | None = None
    batch: int = 1
    head_dim: int | None = None
    kv_dtype: str | None = None

    @property
    def is_solved(self) -> bool:
        """Whether the densest heads are not the answer, so that a layout has to be solved for."""
        return bool(self.constraints.named) or self.robust or self.weights is not None

    def asks_for_curve(self, budget: int | str | None, tau: str | None) -> bool:
        """Whether ``budget`` is several, so that the answer is a curve over budgets (``budget_curve``).

        Raises:
            UserError: several with weights, a memory limit or the threshold "match-budget", which need one budget.
        """
        if not asks_for_several(budget, tau):
            return False
        if self.weights is not None or self.kv_bytes is not None:
            option = "--weights" if self.weights is not None else "--kv-bytes"
            raise UserError(f"several budgets count global heads, so they do not go with {option}: give one")
        return True

    def cache_cost(self, table: HeadScores, window: int | None) -> CacheCost | None:
        """Bytes of a head at ``context``; None without one.

        Raises:
            UserError: a number out of range, or neither option nor probe says the head dimension or dtype.
        """
        if self.context is None:
            return None
        own = {}
        for fact, option in (("head_dim", "head_dim"), ("dtype", "kv_dtype")):
            value = getattr(self, option) or table.metadata.get(fact)
            if value is None:
                raise UserError(f"the probe '{table.name}' does not say the model's {fact}: give {option_name(option)}")
            own[fact] = value
        return CacheCost(self.context, self.batch, window or table.window or DEFAULT_WINDOW, **own)

    def limit(self, table: HeadScores, budget: int | str | None, window: int | None) -> Limit:
        """The budget in what it counts: heads, or the unit of the weights.

        Raises:
            UserError: a budget that makes no sense, or options that contradict each other.
        """
        if self.kv_bytes is not None:
            if budget is not None or self.weights is not None:
                raise UserError(f"give --kv-bytes or {'--budget' if budget is not None else '--weights'}, not both")
            cost = self.cache_cost(table, window)
            if cost is None:
                raise UserError("--kv-bytes needs --context: the tokens per sequence that it has to hold")
            return Limit(cost.largest_budget(parse_bytes(self.kv_bytes), table.num_heads))
        if self.weights is None:
            return Limit(parse_budget(budget, table.num_heads))
        weights = read_weights(self.weights, table)
        return Limit(_parse_weight(budget, float(weights.sum())), weights)

    def solve(self, table: HeadScores, limit: Limit, window: int | None) -> Layout:
        """The best layout that meets the constraints within the limit. Raises ``UserError`` as ``solve``."""
        return solve(table, limit.budget, self.constraints, limit.weights, robust=self.robust, window=window)

    def memory(self, table: HeadScores, num_global: int, window: int | None) -> str | None:
        """Says what the caches take with ``num_global`` global heads, beside all and none; None without a context."""
        cost = self.cache_cost(table, window)
        if cost is None:
            return None
        takes, full, local = (format_bytes(cost.total(n, table.num_heads)) for n in (num_global, table.num_heads, 0))
        room = f"{self.kv_bytes} holds {num_global} global heads: " if self.kv_bytes else ""
        return (
            f"{room}{takes} of keys and values at {cost.context:,} tokens x {cost.batch}, head dimension "
            f"{cost.head_dim}, {cost.dtype}; all heads global {full}, all local {local}"
        )

    def probability(self, resampled: Bootstrap, limit: Limit, *, progress: Progress | None = None) -> Float:
        """[L, Hkv], share of resamples in which the solution takes a head."""
        table = resampled.table
        problem = Problem(table.grid, self.constraints.named, limit.budget, limit.weights)
        gap = _ROUGH_GAP if self.robust and table.num_heads > _LARGE else _RESAMPLE_GAP

        def choose(density: Float) -> NDArray[np.bool_]:
            best = problem.optimum(density, gap=gap)
            assert best is not None  # what is feasible does not depend on the densities
            return best.mask

        return resampled.probability_of(choose, robust=self.robust, progress=progress)


@dataclass(frozen=True, eq=False)
class Limit:
    """A budget of global heads, or of what they weigh: [L, Hkv]."""

    budget: float
    weights: Float | None = None

    def heads(self, table: HeadScores) -> int:
        """The budget in heads: as many as weigh so much on average, at least 1."""
        share = self.budget / (table.num_heads if self.weights is None else float(self.weights.sum()))
        return max(1, round(share * table.num_heads))


def asks_for_several(budget: int | str | None, tau: str | None) -> bool:
    """Whether ``budget`` is several. Raises ``UserError`` for these with the threshold "match-budget"."""
    if is_several(budget) and tau == MATCH_BUDGET:
        raise UserError(f"--tau {MATCH_BUDGET} needs one budget, not several: give the threshold as a number")
    return is_several(budget)


def _parse_weight(budget: int | str | None, total: float) -> float:
    """A budget of weights: a number, or a share of all."""
    text = str(budget).strip()
    try:
        limit = float(text[:-1]) / 100 * total if text.endswith("%") else float(text)
    except ValueError as error:
        raise UserError("--weights needs --budget in the unit of the weights, such as 12.5, or as 25%") from error
    if not 0 < limit <= total * (1 + 1e-9):
        raise UserError(f"budget {budget} means a weight of {limit:g}; all heads together weigh {total:g}")
    return limit
