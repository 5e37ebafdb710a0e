"""Hold what the user requires of a proposal besides its budget: constraints, head weights, a memory limit."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.artifacts.tried_layouts import TriedLayout
from spkv_nas.base.arrays import Float, Mask
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.base.units import format_bytes
from spkv_nas.cost.cache_cost import CONTEXT, CacheCost, EngineCost, memory_bytes
from spkv_nas.engines.engine import Serving
from spkv_nas.proposal import coverage, integer_program, windows
from spkv_nas.proposal.budget import MATCH_BUDGET, is_several, parse_budget
from spkv_nas.proposal.constraints import Constraints, best_layout, read_head_costs, solve

_RESAMPLE_GAP = 1e-4  # relative MIP gap per bootstrap resample
_ROUGH_GAP = 1e-3  # the same for many heads if the lowest coverage of a domain is maximised
NO_CONTEXT = "--engine needs --context, the maximum number of tokens of a request"
# Difference of shares of full attention's cache that are one memory, because records round them
_SAME_SHARE = 1e-4
_LARGE = 200  # number of heads above which the rough gap is used


@dataclass(frozen=True)
class Requirements:
    """Options of ``propose`` besides the budget. Raises ``UserError``: an engine without a context."""

    constraints: Constraints = field(default_factory=Constraints)
    robust: bool = False  # maximise the lowest per-domain coverage instead of the overall one
    # CSV file with the cost of every head if it is global, instead of 1
    head_costs: Path | None = None
    # memory for keys and values such as "20%" of full attention's or "2GiB", instead of a budget; requires ``context``,
    # unless the probe was measured for a memory
    kv_bytes: str | None = None
    context: int | None = None  # tokens per sequence
    batch: int = 1  # number of sequences in the cache
    head_dim: int | None = None  # of the cache; by default the probe's
    # Of the cache; by default the engine's, if it is a setting there, else the probe's
    kv_dtype: str | None = None
    # Engine whose allocator counts the memory, at a ``context``; None: keys and values
    serving: Serving | None = None

    def __post_init__(self) -> None:
        """Check that an engine has a context."""
        if self.serving is not None and self.context is None:
            raise UserError(NO_CONTEXT)

    @property
    def is_solved(self) -> bool:
        """Return true if a layout has to be solved for, because the densest heads are not the answer."""
        return bool(self.constraints.named) or self.robust or self.head_costs is not None

    def asks_for_curve(self, budget: int | str | None, tau: str | None) -> bool:
        """Return true if ``budget`` names several budgets, which are answered by ``budget_curve``.

        Raises ``UserError``: several budgets are combined with head costs, a memory limit or the threshold
        "match-budget", each of which needs a single budget.
        """
        if not is_several(budget):
            return False
        if tau == MATCH_BUDGET:
            raise UserError(
                f"--tau {MATCH_BUDGET} needs a single budget; with several, "
                "give the threshold as a number"
            )
        if self.head_costs is not None or self.kv_bytes is not None:
            option = "--head-costs" if self.head_costs is not None else "--memory"
            raise UserError(f"{option} needs a single budget: give one, or leave out {option}")
        return True

    def cache_cost(self, table: HeadScores, window: int | None) -> CacheCost | None:
        """Return the cost model of the KV cache at ``context`` tokens; None without a context.

        Raises ``UserError``: a number is out of range, or the head dimension or dtype is not known.
        """
        # Count for the context of a probe that was measured for a memory, or a limit of memory for what was measured
        context = self.context or table.record.context
        if context is None and self.kv_bytes is not None:
            context = table.record.measured_context
        if context is None:
            return None
        window = window or table.window or DEFAULT_WINDOW
        cache_facts = self._cache_facts(table)
        if self.serving is None:
            return CacheCost(context, self.batch, window, sinks=table.sinks, **cache_facts)
        return EngineCost(
            context, self.batch, window, sinks=table.sinks, serving=self.serving, **cache_facts
        )

    def _cache_facts(self, table: HeadScores) -> dict[str, Any]:
        """Return what the cache holds, from the engine, the requirements, or the probe's model.

        Raises ``UserError``: a fact is not known.
        """
        served_dtype = None if self.serving is None else self.serving.settings.kv_dtype
        cache_facts = dict(table.cache_facts)
        if self.head_dim is not None:
            cache_facts["head_dim"] = self.head_dim
            cache_facts["native_dims"] = ()
        cache_facts["dtype"] = served_dtype or self.kv_dtype or table.record.dtype
        for fact, value in cache_facts.items():
            if value is None:
                raise UserError(
                    f"the probe '{table.name}' does not record the model's {fact}, "
                    "which the memory depends on\n"
                    "probe the model with this version, or leave out --context"
                )
        return cache_facts

    def cost_of_layouts(self, table: HeadScores, window: int | None) -> CacheCost:
        """Return the cost model of layouts: at the context at which the probe measured losses if no other is given."""
        context = self.context or table.record.measured_context or CONTEXT
        cost = replace(self, context=context).cache_cost(table, window)
        assert cost is not None  # there is a context
        return cost

    def remarks(self, table: HeadScores, window: int | None) -> list[str]:
        """Return sentences on a memory that full attention fits in, and on a context beyond the model's."""
        cost = self.cache_cost(table, window)
        if cost is None:
            return []
        sentences = []
        full = cost.full(table.num_heads)
        if self.kv_bytes is not None and memory_bytes(self.kv_bytes, cost, table.num_heads) >= full:
            sentences.append(
                f"full attention takes {format_bytes(full)} at {cost.context:,} tokens x "
                f"{cost.batch}, which fits in {self.kv_bytes}: no head has to be local"
            )
        positions = table.record.positions
        if positions is not None and cost.context > positions:
            sentences.append(
                f"{cost.context:,} tokens are {cost.context / positions:.3g} times the model's "
                f"context of {positions:,}: nothing says what any layout loses there"
            )
        return sentences

    def limit(self, table: HeadScores, budget: int | str | None, window: int | None) -> "Limit":
        """Resolve the budget to a limit in heads, or in the unit of the weights.

        Raises ``UserError``: the budget is invalid, or options contradict each other.
        """
        # Convert the memory limit to a number of heads
        if self.kv_bytes is not None:
            if budget is not None or self.head_costs is not None:
                option = "--head-costs" if budget is None else "--budget"
                raise UserError(f"give --memory or {option}, not both")
            cost = self.cache_cost(table, window)
            if cost is None:
                raise UserError(
                    "--memory needs --context, the number of tokens per sequence in the KV cache"
                )
            memory = memory_bytes(self.kv_bytes, cost, table.num_heads)
            return Limit(cost.largest_budget(memory, table.num_heads))
        # Parse a budget in heads, or in the unit of the head costs
        if self.head_costs is None:
            if budget is None:
                budget = table.memory_budget
            return Limit(parse_budget(budget, table.num_candidates))
        weights = read_head_costs(self.head_costs, table)
        return Limit(_parse_weight(budget, float(weights.sum())), weights)

    def solve(self, table: HeadScores, limit: "Limit", window: int | None) -> Layout:
        """Return the layout of highest coverage within the limit. Raises ``UserError`` as ``constraints.solve``."""
        return solve(
            table, limit.budget, self.constraints, limit.weights, robust=self.robust, window=window
        )

    def at_best_window(self, table: HeadScores, window: int | None) -> HeadScores:
        """Return a table with costs of windows at ``window``, or at the one that loses least in a limit of memory."""
        if table.window_costs is None:
            return table
        cost = None if self.kv_bytes is None or window is not None else self.cache_cost(table, None)
        if self.kv_bytes is not None and cost is not None:
            memory = memory_bytes(self.kv_bytes, cost, table.num_heads)
            # The probe measured its window for this memory
            if self._is_of_probe(table, memory, cost):
                return table
            tried = windows.windows_by_costs(table, cost, memory)
            window = min(tried, key=lambda row: row.cost).window
        return table if window is None else windows.at_window(table, window)

    def window_per_head(
        self, table: HeadScores, limit: "Limit", window: int | None
    ) -> dict[str, Layout]:
        """Return the layout with a window per head in the memory that the limit takes, or that is given or recorded.

        It is by name; none if the table has no costs of windows, or the limit counts head costs. Raises ``UserError``
        as ``windows.window_per_head``.
        """
        if table.window_costs is None or limit.weights is not None:
            return {}
        cost = self.cost_of_layouts(table, window)
        memory = cost.total(limit.heads(table), table.num_heads)
        if self.kv_bytes is not None or limit.budget == table.memory_budget:
            limit_text = self.kv_bytes or str(table.record.memory)
            memory = memory_bytes(limit_text, cost, table.num_heads)
        layout = windows.window_per_head(table, cost, memory, self.constraints, robust=self.robust)
        return {layout.strategy: layout}

    def _is_of_probe(self, table: HeadScores, memory: int, cost: CacheCost) -> bool:
        """Return whether the probe was measured for this memory, in bytes of keys and values, at this context."""
        share = table.record.memory
        if share is None or self.serving is not None:
            return False
        if cost.context != table.record.context:
            return False
        return bool(abs(memory / cost.full(table.num_heads) - share) < _SAME_SHARE)

    def compared(self, table: HeadScores, limit: "Limit", window: int | None) -> list[TriedLayout]:
        """Return the layouts that the probe compared on text, if they are of this memory; none otherwise.

        They were compared without constraints, in keys and values, at the probe's own window and sink tokens.
        """
        if self.is_solved or self.serving is not None or limit.budget != table.memory_budget:
            return []
        if self.kv_bytes is not None:
            cost = self.cache_cost(table, window)
            assert cost is not None  # the limit was resolved with it
            memory = memory_bytes(self.kv_bytes, cost, table.num_heads)
            if not self._is_of_probe(table, memory, cost):
                return []
        if self.context not in (None, table.record.context):
            return []
        if window not in (None, table.window):
            return []
        return [tried for tried in table.record.tried if tried.layout.sinks == table.sinks]

    def fitted(self, table: HeadScores, limit: "Limit", window: int | None) -> "Limit":
        """Lower a limit until the solution within it fits in the memory of an engine.

        A solution with fewer global heads than the limit can need more memory than one that reaches it.

        Raises ``UserError``: no solution fits, or as ``solve``.
        """
        cost = self.cache_cost(table, window)
        if self.kv_bytes is None or not isinstance(cost, EngineCost):
            return limit
        memory = memory_bytes(self.kv_bytes, cost, table.num_heads)
        num_global = self.solve(table, limit, window).num_global
        while cost.total(num_global, table.num_heads) > memory:
            limit = Limit(cost.largest_budget(memory, table.num_heads, most=num_global - 1))
            num_global = self.solve(table, limit, window).num_global
        return limit

    def solve_apart(
        self,
        table: HeadScores,
        limit: "Limit",
        window: int | None,
        *,
        excluded: Sequence[Layout],
        apart: int,
    ) -> Layout | None:
        """Return the best layout that differs from each of ``excluded`` in at least ``apart`` heads; None without one.

        It fits in the memory of an engine, as in ``fitted``.
        """
        cost = self.cache_cost(table, window)
        while True:
            layout = best_layout(
                table,
                limit.budget,
                self.constraints,
                limit.weights,
                robust=self.robust,
                window=window,
                excluded=excluded,
                apart=apart,
                at_least=1,
            )
            if layout is None or self.kv_bytes is None or not isinstance(cost, EngineCost):
                return layout
            memory = memory_bytes(self.kv_bytes, cost, table.num_heads)
            if cost.total(layout.num_global, table.num_heads) <= memory:
                return layout
            # Retry with the next smaller budget that fits in memory
            most = layout.num_global - 1
            limit = Limit(cost.num_global_within(memory, table.num_heads, most=most))
            if not limit.budget:
                return None

    def max_heads_same_memory(self, table: HeadScores, num_global: int, window: int | None) -> int:
        """Return the largest number of global heads that takes no more memory in the engine than ``num_global``."""
        cost = self.cache_cost(table, window)
        if not isinstance(cost, EngineCost):
            return num_global
        stride = table.num_kv_heads if self.constraints.granularity == "layer" else 1
        return cost.max_heads_same_memory(num_global, table.num_heads, stride=stride)

    def memory(self, table: HeadScores, num_global: int, window: int | None) -> str | None:
        """Describe the cache of ``num_global`` global heads, beside all global and all local; None without context."""
        cost = self.cache_cost(table, window)
        if cost is None:
            return None
        # Describe the memory with these, all and no heads global
        used = format_bytes(cost.total(num_global, table.num_heads))
        full = format_bytes(cost.total(table.num_candidates, table.num_heads))
        local = format_bytes(cost.total(0, table.num_heads))
        room = f"{self.kv_bytes} has room for {num_global} global heads: " if self.kv_bytes else ""
        what = "of keys and values"
        settings = ""
        serving = self.serving
        if serving is not None:
            what = f"in {serving.engine.title}"
            settings = f"{serving.words}, "
        sentence = (
            f"{room}{used} {what} at {cost.context:,} tokens x {cost.batch}, "
            f"{settings}head dimension {cost.head_dim}, {cost.dtype}; "
            f"{full} with all heads global, {local} with all heads local"
        )
        # Mention further heads that take no more memory
        larger = self.max_heads_same_memory(table, num_global, window)
        if larger > num_global:
            sentence += f"\n{larger} global heads take no more memory there than {num_global}"
        return sentence

    def probability(
        self, resampled: coverage.Bootstrap, limit: "Limit", *, progress: Progress | None = None
    ) -> Float:
        """Return [L, Hkv], the share of bootstrap resamples whose solution makes a head global."""
        table = resampled.table
        named = self.constraints.on(table).named
        problem = integer_program.Problem(table.heads_per_layer, named, limit.budget, limit.weights)
        gap = _ROUGH_GAP if self.robust and table.num_heads > _LARGE else _RESAMPLE_GAP

        def choose(density: Float) -> Mask:
            """Return the optimal mask [L, Hkv] for densities [P, L, Hkv]."""
            best = problem.optimum(density, gap=gap)
            assert best is not None  # feasibility does not depend on the densities
            return best.mask

        return resampled.probability_of(choose, robust=self.robust, progress=progress)


@dataclass(frozen=True, eq=False)
class Limit:
    """The limit on global heads: their number, or their total weight if ``weights`` [L, Hkv] are set."""

    budget: float
    weights: Float | None = None

    def heads(self, table: HeadScores) -> int:
        """Return the limit in heads: divided by the mean weight and rounded, at least 1."""
        total = table.num_heads if self.weights is None else float(self.weights.sum())
        return max(1, round(self.budget / total * table.num_heads))


def _parse_weight(budget: int | str | None, total: float) -> float:
    """Parse a budget in the unit of the weights: a number, or a share of the total such as "25%"."""
    text = str(budget).strip()
    try:
        limit = float(text[:-1]) / 100 * total if text.endswith("%") else float(text)
    except ValueError as error:
        raise UserError(
            "--head-costs needs --budget in the unit of the costs, such as 12.5, or as a share, "
            "such as 25%"
        ) from error
    if not 0 < limit <= total * (1 + 1e-9):
        raise UserError(
            f"budget {budget} means a weight of {limit:g}; "
            f"it must be above 0 and at most {total:g}, the weight of all heads"
        )
    return limit
