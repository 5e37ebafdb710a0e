"""Choose windows of local heads within a memory budget: one with the number of global heads, or one for every head.

At equal memory a wider window leaves fewer global heads, or narrower windows for other heads. What each choice costs is
known to first order from ``WindowCosts``. A window for every head is a multiple-choice knapsack, solved exactly: every
head takes one kind of attention, a window or global, and the sum of the costs is minimised, or with ``robust`` the
largest of the sums over domains.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy  # submodules load lazily on use
from numpy.typing import NDArray

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.head_tables import WindowCosts, on_grid
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import arrays, errors, units
from spkv_nas.cost.cache_cost import CacheCost, EngineCost
from spkv_nas.proposal import coverage, integer_program
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.proposal.integer_program import Rows
from spkv_nas.proposal.strategies import INTERLEAVED_LAST

NARROWEST = 32  # narrowest window that is tried
# Windows are multiples of it: the page size of serving engines, and a tile of the kernels
_STEP = 16
_MOST_TRIED = 12  # windows
# Factor between the two single windows among the rivals of a window per head: neighbours lose the same, so that
# comparing them decides nothing
_APART = 2.0
USUAL_RIVALS = 4  # of a window per head: itself, two single windows, and whole layers
MOST_WINDOWS = 3  # of a layout, unless a constraint allows more: as many as vLLM serves
WINDOW_PER_HEAD = "window-per-head"  # strategy name of the layouts
ONE_WINDOW = "one-window-"  # before the window, in the names of layouts with one window
# Before the window, in the names of layouts with whole global layers
WHOLE_LAYERS = "whole-layers-"
# Before the window, in the names of layouts with one window whose heads head gates chose
BY_GATES = "head-gates-"
_LOCAL_PART = 0.6  # of the memory for a typical window; the best took 42 to 62 % (reports/LOG.md)
_MOST_BY_GATES = 2  # windows of layouts whose heads head gates choose
# Factor on the costs, whose sum of sizes is 1, because HiGHS stops at an absolute gap of 1e-6
_SCALE = 1e6
_MOST_TRIES = 12  # solutions for a limit that is lowered to what fits
_LOWERED = 0.99  # further factor by which it is lowered
_SLACK = 1e-6  # tolerance of a row, of which the largest coefficient is 1


@dataclass(frozen=True)
class TriedWindow:
    """Window of local heads, the global heads that the memory leaves, and what the layout loses by its costs."""

    window: int  # recent keys that a local head sees, including the query's own
    num_global: int  # number of global KV heads
    memory: float  # share of full attention's KV cache
    cost: float = np.nan  # loss in nats per token by the costs of windows; NaN without


def candidate_windows(
    cost: CacheCost, num_heads: int, limit: int, widest: int
) -> list[TriedWindow]:
    """Return the windows worth trying within ``limit`` bytes of KV cache of ``num_heads`` heads, up to the ``widest``.

    ``cost`` is the size of a head's cache, whose window is not used.

    Raises ``UserError``: the memory leaves no global head beside the narrowest window.
    """
    full = cost.full(num_heads)
    narrowest = min(NARROWEST, widest)
    # Keep the widest window of each number of global heads
    widest_of: dict[int, int] = {}
    for window in range(_STEP, max(widest, _STEP) + 1, _STEP):
        if window >= narrowest:
            number = replace(cost, window=window).num_global_within(limit, num_heads)
            widest_of[number] = window
    pairs = sorted((window, number) for number, window in widest_of.items() if number >= 1)
    if not pairs:
        raise errors.UserError(
            f"{100 * limit / full:.3g} % of the KV cache leave no global head beside windows of "
            f"{narrowest} keys: give more memory, or a longer context"
        )
    # Of many, keep some that are evenly spread over the octaves
    if len(pairs) > _MOST_TRIED:
        octaves = np.log2([window for window, _ in pairs])
        wanted = np.linspace(octaves[0], octaves[-1], _MOST_TRIED)
        nearest = {int(np.abs(octaves - octave).argmin()) for octave in wanted}
        pairs = [pairs[index] for index in sorted(nearest)]
    tried = []
    for window, number in pairs:
        memory = replace(cost, window=window).total(number, num_heads) / full
        tried.append(TriedWindow(window, number, memory))
    return tried


def typical_windows(
    candidates: Sequence[TriedWindow], cost: CacheCost, limit: int, num_heads: int
) -> list[TriedWindow]:
    """Return candidates, the most typical window first: that whose local heads take 60 % of ``limit`` bytes.

    Arguments are those of ``candidate_windows``.
    """
    typical = _LOCAL_PART * limit / cost.full(num_heads)
    return sorted(candidates, key=lambda row: abs(row.window / cost.context - typical))


def at_window(table: HeadScores, window: int) -> HeadScores:
    """Return a table whose layouts have a window, and whose scores are the costs of it if they were measured."""
    if table.window_costs is None:
        return replace(table, window=window)
    costs = table.window_costs
    rows = table.rows.copy()
    domain = rows["domain"].map(costs.domains.index)
    rows["score"] = costs.at(window)[domain, rows["layer"], rows["kv_head"]]
    if window != table.window:
        rows["standard_error"] = np.nan
    return replace(table, rows=rows, window=window, probe_hash=table.content_hash)


def windows_by_costs(table: HeadScores, cost: CacheCost, limit: int) -> list[TriedWindow]:
    """Return the windows worth trying within ``limit`` bytes, with what the costs say that their layouts lose.

    A layout's global heads are those to which its window costs most. Raises ``UserError`` as ``candidate_windows``.
    """
    costs = table.window_costs
    assert costs is not None
    tried = []
    for row in candidate_windows(cost, table.num_heads, limit, max(costs.windows)):
        by_head = np.tensordot(table.domain_shares, costs.at(row.window), 1)[table.layers]
        ascending = np.sort(by_head[~np.isnan(by_head)])
        num_local = len(ascending) - row.num_global
        tried.append(replace(row, cost=float(ascending[:num_local].sum())))
    return tried


def one_window_layout(table: HeadScores, row: TriedWindow) -> Layout:
    """Return the layout whose global heads are the ``row.num_global`` of highest score at the row's window.

    Heads of layers that are local by design are never among them.
    """
    return _one_window_by(at_window(table, row.window).values, table, row)


def _one_window_by(values: arrays.Float, table: HeadScores, row: TriedWindow) -> Layout:
    """Return the layout whose global heads have the highest of ``values`` [L, Hkv]; as ``one_window_layout``."""
    scores = np.full(table.grid, -np.inf)
    scores[table.layers] = values[table.layers]
    highest_first = np.argsort(-scores, axis=None, kind="stable")
    mask = np.zeros(table.grid, dtype=bool)
    mask.flat[highest_first[: row.num_global]] = True
    heads = table.heads_per_layer
    return Layout.from_mask(mask, window=row.window, sinks=table.sinks, heads_per_layer=heads)


@dataclass(frozen=True)
class WindowProblem:
    """Heads, the costs and sizes of their kinds of attention, and constraints."""

    costs: WindowCosts
    sizes: arrays.Float  # [W + 1], bytes of a head with each window, and of a global head
    # those that are set, by name; layers local by design are in ``local_layers``
    constraints: dict[str, Any]
    native_layers: tuple[int, ...] = ()  # layers that are local by design, which take no bytes here
    max_windows: int | None = None  # most windows of one layout; None: no limit

    @property
    def _shape(self) -> tuple[int, int, int]:
        """Return (L, Hkv, K), with K kinds of attention."""
        _, layers, heads, windows = self.costs.values.shape
        return layers, heads, windows + 1

    @property
    def values(self) -> arrays.Float:
        """Return the costs of all kinds [P, L, Hkv, K], 0 for a global head and where a layer has no head."""
        costs = np.nan_to_num(self.costs.falling, nan=0.0)
        return np.concatenate([costs, np.zeros_like(costs[..., :1])], -1)

    @property
    def _is_head(self) -> NDArray[np.bool_]:
        """Return whether each cell [L, Hkv] is a head; others choose a kind that neither costs nor counts."""
        return ~np.isnan(self.costs.values[0, ..., 0])

    def solve(self, limit: float, shares: arrays.Float) -> NDArray[np.intp]:
        """Return the kind of every head [L, Hkv], an index of ``sizes``, within ``limit`` bytes.

        Args:
            limit: bytes of all heads that are not local by design.
            shares: weights of the domains [R, P]; the largest of the R weighted sums of costs is minimised.

        Raises ``UserError``: no choice meets the constraints, or none was found within ``TIME_LIMIT`` seconds.
        """
        # Weighted costs of all kinds: [R, L * Hkv * K]
        costs = np.tensordot(shares, self.values, 1).reshape(len(shares), -1)
        costs *= _SCALE / max(float(np.abs(costs).sum()), np.finfo(float).tiny)
        # Variables: one per head and kind, one per kind that says whether it is used, and the largest sum of costs
        num_choices = costs.shape[1]
        num_integers = num_choices + self._shape[2]
        is_integer = np.append(np.ones(num_integers), 0.0)
        objective = 1.0 - is_integer
        bounds = scipy.optimize.Bounds(
            np.where(is_integer > 0, 0.0, -np.inf), np.where(is_integer > 0, 1.0, np.inf)
        )
        rows = [*self._rows(), self._memory_row(limit), self._largest_row(costs)]
        # The last row defines the largest sum of costs, and is not checked
        result = integer_program.minimise(
            objective, rows, bounds, is_integer, num_checked=-1, slack=_SLACK
        )
        if result.x is None:
            reason = "meets the constraints"
            if result.status == 1:
                reason = f"was found within {integer_program.TIME_LIMIT:g} s"
            raise errors.UserError(
                f"no choice of windows {reason} in this memory: give more memory, or loosen them"
            )
        return np.asarray(result.x[:num_choices].reshape(self._shape).argmax(-1))

    def _memory_row(self, limit: float) -> Rows:
        """Return the row by which heads take at most ``limit`` bytes."""
        sizes = self.sizes * self._is_head[..., None]
        sizes[list(self.native_layers)] = 0.0
        # HiGHS satisfies a row to 1e-6 only
        unit = float(self.sizes.max())
        left = self._wide(sizes.reshape(1, -1) / unit)
        return Rows(left, -np.inf, limit / unit)

    def _largest_row(self, costs: arrays.Float) -> Rows:
        """Return the rows by which the last variable is at least each of the sums of ``costs`` [R, choices]."""
        num_sums = len(costs)
        kinds_used = np.zeros((num_sums, self._shape[2]))
        left = np.hstack([costs, kinds_used, -np.ones((num_sums, 1))])
        return Rows(scipy.sparse.csr_array(left), -np.inf, 0.0)

    def _rows(self) -> list[Rows]:
        """Return the rows of the constraints."""
        num_layers, heads, kinds = self._shape
        sparse = scipy.sparse
        # Every head takes one kind
        one_kind = sparse.kron(sparse.eye_array(num_layers * heads), np.ones((1, kinds)))
        rows = [Rows(self._wide(one_kind), 1.0, 1.0)]
        # Number of global heads of every layer
        low = np.full(num_layers, float(self.constraints.get("min_per_layer", 0)))
        high = np.full(num_layers, float(self.constraints.get("max_per_layer", heads)))
        for layer in self.constraints.get("global_layers", ()):
            low[layer] = self._is_head[layer].sum()
            high[layer] = low[layer]
        for layer in self.constraints.get("local_layers", ()):
            low[layer] = 0.0
            high[layer] = 0.0
        is_head = np.where(self._is_head, 1.0, 0.0).reshape(1, -1)
        is_global = np.kron(is_head, np.eye(kinds)[-1:])
        of_layer = sparse.kron(sparse.eye_array(num_layers), np.ones((1, heads * kinds)))
        rows.append(Rows(self._wide(of_layer.multiply(is_global)), low, high))
        # Whole layers: the heads of a layer take the kind of its first one
        if self.constraints.get("granularity") == "layer":
            of_first = np.kron(np.repeat(np.eye(heads)[:1], heads, 0), np.eye(kinds))
            difference = np.eye(heads * kinds) - of_first
            as_first = sparse.kron(sparse.eye_array(num_layers), difference)
            rows.append(Rows(self._wide(as_first), 0.0, 0.0))
        if self.max_windows is not None:
            rows += self._window_rows(self.max_windows)
        return rows

    def _window_rows(self, most: int) -> list[Rows]:
        """Return rows by which at most so many windows are used, without layers that are local by design."""
        kinds = self._shape[2]
        layer_of, head_of, kind = np.indices(self._shape).reshape(3, -1)
        counts = self._is_head[layer_of, head_of] & ~np.isin(layer_of, self.native_layers)
        # A choice of a window implies that it is used
        chosen = np.flatnonzero((kind < kinds - 1) & counts)
        is_chosen = scipy.sparse.eye_array(len(kind), format="csr")[chosen]
        is_used = np.eye(kinds)[kind[chosen]]
        implied = scipy.sparse.hstack([is_chosen, -is_used])
        # Count the windows that are used; the last kind is global
        count = np.repeat([[0.0, 1.0]], [len(kind), kinds - 1], 1)
        return [
            Rows(self._wide(implied), -np.inf, 0.0),
            Rows(self._wide(count), -np.inf, float(most)),
        ]

    def _wide(self, left: Any) -> Any:
        """Return rows over the choices, padded with zeros for the other variables."""
        layers, heads, kinds = self._shape
        width = layers * heads * kinds + kinds + 1
        num_rows, num_columns = left.shape
        padding = scipy.sparse.csr_array((num_rows, width - num_columns))
        return scipy.sparse.hstack([left, padding], "csr")


def window_per_head(
    table: HeadScores,
    cost: CacheCost,
    memory: int,
    constraints: Constraints | None = None,
    *,
    robust: bool = False,
) -> Layout:
    """Return the layout of least cost whose KV cache takes at most ``memory`` bytes, with a window for every head.

    ``cost`` has the sizes of the cache, whose window is not used; the allocator of an engine counts. If ``robust``, the
    largest of the costs by domain is minimised instead of their mean. The layout is named "window-per-head"; its
    provenance has the memory and the cost in nats per token.

    Raises ``UserError``: the table has no costs, the constraint is ``uniform``, or no layout fits.
    """
    constraints = (constraints or Constraints()).on(table)
    problem = _problem(table, cost, constraints)
    shares = np.eye(len(problem.costs.domains)) if robust else table.domain_shares[None]
    kinds: list[int | None] = [*problem.costs.windows, None]
    # Layers that are local by design take bytes that the program does not count
    native_bytes = 0 if isinstance(cost, EngineCost) else cost.of_heads(())
    limit = float(memory - native_bytes)
    # Lower the limit until the layout fits, because pages of an engine take more than their tokens
    for _ in range(_MOST_TRIES):
        chosen = problem.solve(limit, shares)
        rows = []
        for row, num_heads in zip(chosen, table.heads_per_layer, strict=True):
            rows.append([kinds[kind] for kind in row[:num_heads]])
        layout = Layout.from_windows(rows, strategy=WINDOW_PER_HEAD, sinks=table.sinks)
        used = cost.layout_bytes(layout, table.layers)
        if used <= memory:
            break
        limit *= _LOWERED * memory / used
    else:
        raise errors.UserError(
            f"no window per head fits in {units.format_bytes(memory)}{cost.where}: give more memory"
        )
    # Record what it was made for
    index = np.broadcast_to(chosen, problem.values.shape[:-1])[..., None]
    losses = shares @ np.take_along_axis(problem.values, index, -1).sum((1, 2, 3))
    origin = coverage.provenance(table, layout, layout.num_global)
    origin["memory"] = memory
    origin["context"] = cost.context
    origin["cost"] = round(float(losses.max()), 6)
    if constraints.named:
        origin["constraints"] = constraints.named
    return replace(layout, provenance=origin)


def predicted_loss(table: HeadScores, layout: Layout) -> float:
    """Return what a layout loses by a table's costs of windows, in nats per token; NaN without costs.

    It is the sum of the costs of all heads, each interpolated at its own window.
    """
    costs = table.window_costs
    if costs is None:
        return float("nan")
    falling = replace(costs, values=costs.falling)
    head_windows = layout.head_windows
    # Interpolate the costs at each window once
    windows = {window for row in head_windows for window in row if window is not None}
    by_window = {
        window: np.tensordot(table.domain_shares, falling.at(window), 1) for window in windows
    }
    total = 0.0
    for layer in table.layers:
        for head, window in enumerate(head_windows[layer]):
            if window is not None:
                total += float(by_window[window][layer, head])
    return total


def rival_layouts(
    table: HeadScores, cost: CacheCost, memory: int, constraints: Constraints | None = None
) -> dict[str, Layout]:
    """Return layouts of several kinds that take at most ``memory`` bytes, by name, to be compared on text.

    They are a window per head; the best single window by the costs of windows, and the best of those that are wider or
    narrower by a factor of two; whole layers at a fixed period with the window that costs least; and typical single
    windows by head gates, where the table has some. Constraints leave the first alone, which is the only one that is
    solved for them.

    Raises ``UserError`` as ``window_per_head``.
    """
    per_head = window_per_head(table, cost, memory, constraints)
    layouts = {per_head.strategy: per_head}
    if constraints is not None and constraints.named:
        return layouts
    try:
        single = sorted(windows_by_costs(table, cost, memory), key=lambda row: row.cost)
    except errors.UserError:  # the memory leaves no global head beside any single window
        return layouts
    for row in _apart(single):
        layout = replace(one_window_layout(table, row), strategy=f"{ONE_WINDOW}{row.window}")
        layouts[layout.strategy] = _recorded(table, layout, memory, cost)
    whole = [_whole_layers(table, row, cost, memory) for row in single]
    fitting = [layout for layout in whole if layout is not None]
    if fitting:
        best = min(fitting, key=lambda layout: predicted_loss(table, layout))
        layouts[best.strategy] = _recorded(table, best, memory, cost)
    if table.record.head_gates is not None:
        for layout in _layouts_by_gates(table, single, cost, memory):
            layouts[layout.strategy] = layout
    return _distinct(layouts)


def _layouts_by_gates(
    table: HeadScores, single: Sequence[TriedWindow], cost: CacheCost, memory: int
) -> list[Layout]:
    """Return layouts of typical single windows whose global heads are those of the highest head gates."""
    gates = _head_gates(table)
    layouts = []
    for row in typical_windows(single, cost, memory, table.num_heads)[:_MOST_BY_GATES]:
        layout = replace(_one_window_by(gates, table, row), strategy=f"{BY_GATES}{row.window}")
        layouts.append(_recorded(table, layout, memory, cost))
    return layouts


def _apart(single: Sequence[TriedWindow]) -> list[TriedWindow]:
    """Return the first window, and the first that is wider or narrower than it by a factor of two, if there is one."""
    first = single[0]
    for row in single:
        if max(row.window / first.window, first.window / row.window) >= _APART:
            return [first, row]
    return [first]


def _head_gates(table: HeadScores) -> arrays.Float:
    """Return the head gates [L, Hkv] in a table's record; ``UserError`` if they are of other heads."""
    rows = table.record.head_gates or []
    if tuple(len(row) for row in rows) != table.heads_per_layer:
        raise errors.UserError(
            f"'{table.name}' has head_gates of other heads than its scores: probe again"
        )
    return on_grid(np.concatenate(rows), table.heads_per_layer)


def _distinct(layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Return layouts by name without those whose heads and windows an earlier one has."""
    first: dict[str, str] = {}
    for name, layout in layouts.items():
        first.setdefault(layout.content, name)
    return {name: layouts[name] for name in first.values()}


def _whole_layers(
    table: HeadScores, row: TriedWindow, cost: CacheCost, memory: int
) -> Layout | None:
    """Return whole global layers at a fixed period, the last one global, within a memory; None if none fits."""
    is_candidate = np.isin(np.arange(table.num_layers), table.layers)
    for num_global in range(row.num_global, 0, -1):
        mask = INTERLEAVED_LAST.choose(table, num_global) & is_candidate[:, None]
        layout = Layout.from_mask(
            mask,
            window=row.window,
            strategy=f"{WHOLE_LAYERS}{row.window}",
            sinks=table.sinks,
            heads_per_layer=table.heads_per_layer,
        )
        if mask.any() and cost.layout_bytes(layout, table.layers) <= memory:
            return layout
    return None


def _recorded(table: HeadScores, layout: Layout, memory: int, cost: CacheCost) -> Layout:
    """Return a layout whose provenance names its probe, the memory that it was made for, and its predicted loss."""
    origin = coverage.provenance(table, layout, layout.num_global)
    origin["memory"] = memory
    origin["context"] = cost.context
    origin["cost"] = round(predicted_loss(table, layout), 6)
    return replace(layout, provenance=origin)


def layouts_by_memory(
    table: HeadScores,
    cost: CacheCost,
    percents: Sequence[float],
    constraints: Constraints | None = None,
) -> dict[float, Layout]:
    """Return the layout with a window per head for each memory budget, in percent of full attention's KV cache.

    Memories that are too small for any layout are left out; errors as ``window_per_head`` if all are.
    """
    layouts: dict[float, Layout] = {}
    for percent in sorted(percents):
        try:
            memory = int(percent / 100.0 * cost.full(table.num_heads))
            layouts[percent] = window_per_head(table, cost, memory, constraints)
        except errors.UserError:
            if percent == max(percents) and not layouts:
                raise
    return layouts


def _problem(table: HeadScores, cost: CacheCost, constraints: Constraints) -> WindowProblem:
    """Return the knapsack of ``window_per_head``; errors as there."""
    costs = table.window_costs
    if costs is None:
        raise errors.UserError(
            f"'{table.name}' has no costs of windows: probe with --signal window-costs"
        )
    if constraints.uniform:
        raise errors.UserError("uniform counts global heads: leave it out for a window per head")
    constraints.check(table.grid)
    # Restrict the windows
    max_windows = constraints.max_windows or MOST_WINDOWS
    if isinstance(cost, EngineCost):
        max_windows = min(max_windows, cost.serving.engine.max_windows)
    if constraints.windows:
        costs = costs.only(constraints.windows)
    sizes = [replace(cost, window=window).local_head for window in costs.windows]
    sizes.append(cost.global_head)
    return WindowProblem(
        costs,
        sizes=np.array(sizes, dtype=np.float64),
        constraints=constraints.named,
        native_layers=tuple(sorted({*range(table.num_layers)} - {*table.layers})),
        max_windows=max_windows,
    )
