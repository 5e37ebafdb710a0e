"""What an architect asks of a proposal beside its budget: constraints, weights, a memory limit; and every budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import write_atomic
from spkv_nas.base.units import format_bytes, parse_bytes
from spkv_nas.cost.cache_memory import CacheCost
from spkv_nas.proposal.budget import is_range, parse_budget
from spkv_nas.proposal.constraints import Constraints, read_weights, solve
from spkv_nas.proposal.coverage import coverage, domain_coverage
from spkv_nas.proposal.integer_program import Problem
from spkv_nas.proposal.propose import propose
from spkv_nas.proposal.stability import Bootstrap, knee

Float = NDArray[np.float64]
SOLVED = ("constrained", "robust")  # strategies of layouts that ``solve`` makes
_RESAMPLE_GAP, _ROUGH_GAP = 1e-4, 1e-3  # share of the best within which a resample is solved; if robust, and large
_LARGE = 200  # heads


@dataclass(frozen=True)
class Demand:
    """The options of ``propose`` that go beyond its budget; see ``spkv-nas propose --help``.

    ``weights`` is a file. ``kv_bytes`` (such as "2GiB") stands in place of a budget and needs ``context``; ``head_dim``
    and ``dtype`` are the probe's by default.
    """

    constraints: Constraints = field(default_factory=Constraints)
    robust: bool = False
    weights: Path | None = None
    kv_bytes: str | None = None
    context: int | None = None
    batch: int = 1
    head_dim: int | None = None
    dtype: str | None = None

    @property
    def is_solved(self) -> bool:
        """Whether the densest heads are not the answer, so that a layout has to be solved for."""
        return bool(self.constraints.named) or self.robust or self.weights is not None

    def cost(self, table: DensityTable, window: int | None) -> CacheCost | None:
        """Bytes of a head at ``context``; None without one.

        Raises:
            UserError: a number out of range, or neither option nor probe says the head dimension or dtype.
        """
        if self.context is None:
            return None
        found = {}
        for name in ("head_dim", "dtype"):
            value = getattr(self, name) or table.metadata.get(name)
            if value is None:
                raise UserError(f"the probe '{table.name}' does not say the model's {name}: give --{_dashed(name)}")
            found[name] = value
        return CacheCost(self.context, self.batch, window or table.window or DEFAULT_WINDOW, **found)

    def limit(self, table: DensityTable, budget: int | str | None, window: int | None) -> Limit:
        """The budget in what it counts: heads, or the unit of the weights.

        Raises:
            UserError: a budget that makes no sense, or options that contradict each other.
        """
        if self.kv_bytes is not None:
            if budget is not None or self.weights is not None:
                raise UserError(f"give --kv-bytes or {'--budget' if budget is not None else '--weights'}, not both")
            cost = self.cost(table, window)
            if cost is None:
                raise UserError("--kv-bytes needs --context: the tokens per sequence that it has to hold")
            return Limit(cost.largest_budget(parse_bytes(self.kv_bytes), table.num_heads))
        if self.weights is None:
            return Limit(parse_budget(18 if budget is None else budget, table.num_heads))
        weights = read_weights(self.weights, table)
        return Limit(_parse_weight(budget, float(weights.sum())), weights)

    def memory(self, table: DensityTable, num_global: int, window: int | None) -> str | None:
        """Says what the caches take with ``num_global`` global heads, beside all and none; None without a context."""
        cost = self.cost(table, window)
        if cost is None:
            return None
        takes, full, local = (format_bytes(cost.total(n, table.num_heads)) for n in (num_global, table.num_heads, 0))
        room = f"{self.kv_bytes} holds {num_global} global heads: " if self.kv_bytes else ""
        return (
            f"{room}{takes} of keys and values at {cost.context:,} tokens x {cost.batch}, head dimension "
            f"{cost.head_dim}, {cost.dtype}; all heads global {full}, all local {local}"
        )

    def probability(
        self, resampled: Bootstrap, limit: Limit, *, progress: Callable[[int, int], None] | None = None
    ) -> Float:
        """[L, Hkv], share of resamples in which the solution takes a head."""
        table = resampled.table
        problem = Problem(
            (table.num_layers, table.num_kv_heads), self.constraints.named, limit.budget, limit.weights
        )  # fmt: skip

        gap = _ROUGH_GAP if self.robust and table.num_heads > _LARGE else _RESAMPLE_GAP

        def choose(density: Float) -> NDArray[np.bool_]:
            found = problem.optimum(density, gap=gap)
            assert found is not None  # what is feasible does not depend on the densities
            return found.mask

        return resampled.probability_of(choose, robust=self.robust, progress=progress)


@dataclass(frozen=True, eq=False)
class Limit:
    """A budget of global heads, or of what they weigh: [L, Hkv]."""

    budget: float
    weights: Float | None = None

    def heads(self, table: DensityTable) -> int:
        """The budget in heads: as many as weigh so much on average, at least 1."""
        share = self.budget / (table.num_heads if self.weights is None else float(self.weights.sum()))
        return max(1, round(share * table.num_heads))


def budget_table(
    table: DensityTable,
    budgets: list[int],
    demand: Demand,
    *,
    resampled: Bootstrap | None = None,
    window: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[pd.DataFrame, dict[str, Layout]]:
    """The best layout at every budget.

    Returns:
        One row per budget: budget, num_global, coverage, worst_domain (the lowest of a domain), coverage_low and
        coverage_high (95 % interval), random (expected of as many random heads), kv_bytes; NaN where unknown. And
        the layouts by name, such as "densest-18".

    Raises:
        UserError: a budget is not feasible under the constraints.
    """
    cost = demand.cost(table, window)
    rows, layouts = [], {}
    for number, (budget, layout) in enumerate(_layouts(table, budgets, demand, window), 1):
        low, high = (np.nan, np.nan) if resampled is None else resampled.coverage(layout.global_mask)
        rows.append(
            {
                "budget": budget,
                "num_global": layout.num_global,
                "coverage": coverage(table, layout),
                "worst_domain": min(domain_coverage(table, layout).values()),
                "coverage_low": low,
                "coverage_high": high,
                "random": layout.num_global / table.num_heads,
                "kv_bytes": np.nan if cost is None else cost.total(layout.num_global, table.num_heads),
            }
        )
        layouts[layout.strategy] = layout
        if progress is not None:
            progress(number, len(budgets))
    return pd.DataFrame(rows), layouts


def knee_row(table: DensityTable, rows: pd.DataFrame, demand: Demand) -> tuple[int, str]:
    """(budget, what it is): the knee of ``rows``.

    Of the densest heads it is ``knee``, in the range or not; of solved layouts the budget of the range at which
    coverage lies farthest above that of as many random heads.
    """
    if not demand.is_solved:
        return knee(table), "the next head is no denser than the average"
    best = rows.iloc[int((rows["coverage"] - rows["random"]).to_numpy().argmax())]
    beyond = "; it is an end of the range, so the knee may lie beyond" if best.name in (0, len(rows) - 1) else ""
    return int(best["budget"]), f"coverage lies farthest above that of random heads there{beyond}"


def write_budgets(folder: Path, rows: pd.DataFrame, layouts: dict[str, Layout]) -> None:
    """Write ``budgets.csv`` and ``budgets/<strategy>-<budget>.yaml``; layouts of an earlier range are removed."""
    write_atomic(folder / "budgets.csv", rows.to_csv(index=False, float_format="%.10g"))
    for name, layout in layouts.items():
        layout.write(folder / "budgets" / f"{name}.yaml")
    for stale in (folder / "budgets").glob("*.yaml"):
        if stale.stem not in layouts:
            stale.unlink()


def check_range(demand: Demand, budget: int | str | None, tau: str | None) -> bool:
    """Whether ``budget`` is a range. Raises ``UserError`` for what does not go with one."""
    if budget is None or not is_range(budget):
        return False
    if demand.weights is not None or demand.kv_bytes is not None:
        option = "--weights" if demand.weights is not None else "--kv-bytes"
        raise UserError(f"a range counts global heads, so it does not go with {option}: give one budget")
    if tau == "match-budget":
        raise UserError("--tau match-budget needs one budget, not a range: give the threshold as a number")
    return True


def _layouts(
    table: DensityTable, budgets: list[int], demand: Demand, window: int | None
) -> Iterator[tuple[int, Layout]]:
    for budget in budgets:
        if demand.is_solved:
            layout = solve(table, budget, demand.constraints, robust=demand.robust, window=window)
        else:
            layout = propose(table, budget, window=window, num_random=0)["densest"]
        yield budget, Layout(layout.heads, layout.window, f"{layout.strategy}-{budget}", layout.provenance)


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


def _dashed(name: str) -> str:
    return name.replace("_", "-")
