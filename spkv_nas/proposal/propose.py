"""Propose a layout per strategy for a budget, and resolve tau; ``*_advice`` functions return a warning or None."""

from dataclasses import replace

import numpy as np

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.artifacts.threshold import rounded_tau
from spkv_nas.base.errors import UserError
from spkv_nas.proposal import coverage
from spkv_nas.proposal.budget import MATCH_BUDGET, parse_budget
from spkv_nas.proposal.requirements import Limit, Requirements
from spkv_nas.proposal.strategies import DENSEST, NUM_RANDOM, STRATEGIES, Strategy, densest_first

# Of "match-budget": absolute difference of mean density and the budget's share of heads
_MATCH_TOLERANCE = 0.01
# Warn if the budget differs by more than this factor from the one the table was learned for
_MAX_BUDGET_RATIO = 1.75
# Warn of ties if mean density is at least this multiple of the budget's share (reports/LOG.md)
_MIN_TIE_RATIO = 1.5


def propose(
    table: HeadScores,
    budget: int | str | None = None,
    *,
    window: int | None = None,
    seed: int = 0,
    num_random: int = NUM_RANDOM,
    memory: str | float | None = None,
    context: int | None = None,
) -> dict[str, Layout]:
    """Choose the global heads for a budget, or a limit of memory, by every strategy.

    Example::

        layouts = spkv_nas.propose(scores, budget="25%")
        spkv_nas.apply_layout(model, layouts["densest"])

    Args:
        table: head densities.
        budget: number of global KV heads, or a share such as "25%"; defaults to the number that the table was learned
            for, or the paper's share, 2 of 7 heads. The layer patterns (A and B) round it to whole layers.
        window: local attention window in tokens; defaults to the table's, or 128.
        seed: random seed of the first random layout; the others use consecutive seeds.
        num_random: number of layouts of each random strategy.
        memory: limit on the KV cache in place of ``budget``, as a share of full attention's ("20%") or in bytes.
        context: tokens per sequence for which the memory is counted; defaults to the probe's, or the model's.

    Returns:
        Layouts by name, in the order of ``strategies.STRATEGIES``: interleaved-first (A), interleaved-last (B),
        random-0, ... (C), densest (D), sparsest, and those of strategies that installed packages add; and
        window-per-head, of the same memory, if the table has costs of windows. Their sink tokens are the table's.

    Raises ``UserError``: the budget is not 1 to the number of heads, or the memory has room for none.
    """
    # Resolve the budget, or the memory
    requirements = Requirements(kv_bytes=None if memory is None else str(memory), context=context)
    table = requirements.at_best_window(table, window)
    if memory is None:
        if budget is None:
            budget = table.record.budget
        limit = Limit(parse_budget(budget, table.num_candidates))
    else:
        limit = requirements.limit(table, budget, window)
    heads = limit.heads(table)
    # Choose heads by every strategy; the layouts of a random one take consecutive seeds
    layouts = {}
    for strategy in STRATEGIES:
        for number, name in enumerate(strategy.names(num_random)):
            layouts[name] = layout_by(
                strategy, table, heads, name=name, window=window, seed=seed + number
            )
    return layouts | requirements.window_per_head(table, limit, window)


def layout_by(
    strategy: Strategy,
    table: HeadScores,
    heads: int,
    *,
    name: str = "",
    window: int | None = None,
    seed: int = 0,
) -> Layout:
    """Choose the global heads by one strategy, and record their provenance; sink tokens are the table's.

    The strategy chooses among the heads that can be global (``HeadScores.layers``); a random one takes ``seed``. The
    layout's name defaults to the strategy's, its window to the table's, or 128 tokens.

    Raises ``UserError``: the strategy returns no mask of the table's grid.
    """
    # Let the strategy choose among the heads that can be global
    candidates = _candidates(table)
    chosen = strategy.choose(candidates, heads, seed=seed)
    is_mask = chosen.dtype == np.bool_ and chosen.shape == candidates.grid
    if not is_mask or (chosen & ~candidates.is_head).any():
        raise UserError(
            f"the strategy '{strategy.name}' must return a bool mask of shape "
            f"{list(candidates.grid)}; it returned {chosen.dtype} of shape {list(chosen.shape)}"
        )
    # Place its choice in the grid of the whole model
    mask = np.zeros(table.grid, dtype=np.bool_)
    mask[table.layers, : chosen.shape[1]] = chosen
    if window is None:
        window = table.window or DEFAULT_WINDOW
    layout = Layout.from_mask(
        mask,
        window=window,
        strategy=name or strategy.name,
        sinks=table.sinks,
        heads_per_layer=table.heads_per_layer,
    )
    drawn_with = seed if strategy.is_random else None
    return replace(layout, provenance=coverage.provenance(table, layout, heads, drawn_with))


def _candidates(table: HeadScores) -> HeadScores:
    """Return the table without layers that are local by design, whose other layers count from 0."""
    if table.num_candidates == table.num_heads:
        return table
    index = {layer: number for number, layer in enumerate(table.layers)}
    rows = table.rows[table.rows["layer"].isin(index)].copy()
    rows["layer"] = rows["layer"].map(index)
    # What describes the whole model is left out
    return replace(
        table,
        rows=rows.reset_index(drop=True),
        record=table.record.without("native_windows", "head_dims"),
        positions=None,
        histogram=None,
        documents=None,
        gains=None,
    )


def densest_layout(
    table: HeadScores, heads: int, *, name: str = "", window: int | None = None
) -> Layout:
    """Return the layout of the heads of highest score; see ``layout_by``."""
    return layout_by(DENSEST, table, heads, name=name, window=window)


def with_sinks(table: HeadScores, sinks: int | None) -> HeadScores:
    """Return a table whose layouts get this number of sink tokens; unchanged for None."""
    return table if sinks is None else table.with_record(sinks=sinks)


def resolve_tau(table: HeadScores, tau: str | None, budget: int | str | None) -> HeadScores:
    """Return the table at the density threshold ``tau``.

    Args:
        table: head scores.
        tau: a number in [0, 1]; "match-budget" for the threshold whose mean density is closest to budget / heads (a
            table with a single threshold keeps it); or None for the table as it is.
        budget: number of global heads or share; used by "match-budget" only.

    Raises ``UserError``: ``tau`` is none of these, the table has no other threshold, or it holds no densities.
    """
    if tau is None:
        return table
    if not table.is_density:
        raise UserError(
            f"--tau applies to densities only, but '{table.name}' holds scores of signal "
            f"{table.signal}"
        )
    # Match the mean density to the budget
    if tau == MATCH_BUDGET:
        share = parse_budget(budget, table.num_candidates) / table.num_heads
        if table.histogram is None:
            return table
        return table.at_tau(rounded_tau(table.tau_for_density(share)))
    try:
        number = float(tau)
    except ValueError as error:
        raise UserError(
            f"tau must be a number in [0, 1] or '{MATCH_BUDGET}'; found '{tau}'"
        ) from error
    return table.at_tau(number)


def unmatched(table: HeadScores, budget: int | str | None) -> str | None:
    """Warn if "match-budget" found no tau with a mean density near the budget's share of heads (``resolve_tau``)."""
    share = parse_budget(budget, table.num_candidates) / table.num_heads
    if abs(table.mean - share) <= _MATCH_TOLERANCE:
        return None
    reason = "no threshold gives"
    if table.histogram is None:
        reason = "the only recorded threshold does not give"
    return (
        f"'{table.name}': {reason} a mean density equal to the budget's share of heads, "
        f"{share:.2f}; using tau {table.tau:g}, where the mean density is {table.mean:.2f}"
    )


def layer_advice(table: HeadScores, granularity: str) -> str | None:
    """Warn that heads tie within layers, if the probe measured whole layers but single heads are chosen."""
    measured = table.record.granularity
    if measured not in ("layer", "mixed") or granularity == "layer":
        return None
    if measured == "mixed":
        return (
            f"'{table.name}' measured single heads only in the layers with the largest gains; "
            "in the other layers all heads of a layer have equal scores"
        )
    return (
        f"'{table.name}' was measured for whole layers, so all heads of a layer have equal scores: "
        "choose whole layers with --granularity layer"
    )


def price_advice(table: HeadScores, budget: int | str | None) -> str | None:
    """Warn that the table was learned for a very different budget, so its ranking may not apply to this one."""
    if table.window_costs is not None:  # which hold for any budget
        return None
    share = parse_budget(budget, table.num_candidates) / table.num_heads
    # Compare with the target density of the gates
    priced = table.record.target_density
    if priced is not None and _is_far(share / priced):
        return (
            f"the gates were trained to keep {priced:.0%} of the keys, "
            f"but the budget is {share:.0%} of the heads: probe again with --budget {share:.0%}, "
            f"or retrain with gates.target_density: {share:.2g} in the recipe"
        )
    # Compare with the budget that the scores were learned for
    learned_for = table.record.budget
    if learned_for is not None and _is_far(share * table.num_heads / learned_for):
        return (
            f"'{table.name}' was learned for {learned_for} global heads, "
            f"but the budget is {share:.0%} of {table.num_heads}: "
            f"probe again with --budget {share:.0%}"
        )
    return None


def _is_far(ratio: float) -> bool:
    """Return whether the ratio of two budgets is too far from 1 for scores learned for one to rank heads for both."""
    return not 1 / _MAX_BUDGET_RATIO <= ratio <= _MAX_BUDGET_RATIO


def tie_advice(table: HeadScores, budget: int) -> str | None:
    """Warn that the budget cuts through equally scored heads, of which the first by layer are taken."""
    values = table.values[table.is_head]
    order = densest_first(values)
    if not 0 < budget < values.size:
        return None
    last_chosen, first_other = values[order[budget - 1 : budget + 1]]
    if last_chosen != first_other:
        return None
    if np.ptp(values) == 0:
        return "all heads have the same score, so every choice of heads is equally good"
    # Count the tied heads, and those of them within the budget
    is_tied = values == first_other
    num_chosen = int(is_tied[order[:budget]].sum())
    return (
        f"{int(is_tied.sum())} heads are tied at a score of {first_other:.4g}, "
        f"and the budget includes only {num_chosen} of them: those of the lowest layers, "
        "an arbitrary choice"
    )


def default_window(table: HeadScores, window: int | None) -> str | None:
    """Warn that layouts use the default window because neither the table nor the caller sets one."""
    if window is not None or table.window is not None:
        return None
    return (
        f"'{table.name}' does not record a window: using {DEFAULT_WINDOW} tokens; "
        "give --window W for another"
    )


def tau_advice(table: HeadScores, budget: int | str | None) -> str | None:
    """Warn that the densest heads nearly tie: mean density far exceeds the budget's share, so tau is too low."""
    share = parse_budget(budget, table.num_candidates) / table.num_heads
    if table.histogram is None or table.mean < _MIN_TIE_RATIO * share:
        return None
    return (
        f"mean density {table.mean:.2f} at tau {table.tau:g} is {table.mean / share:.1f} times the "
        f"budget's share of heads ({share:.2f}): many heads keep nearly all keys, "
        f"so which of them the budget includes is almost random. Use --tau {MATCH_BUDGET}, "
        "the threshold whose mean density equals that share"
    )
