"""Propose: layouts for a budget of global heads, by every strategy, and the threshold to compare the heads at."""

from __future__ import annotations

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.histogram import rounded_tau
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.base.errors import UserError
from spkv_nas.proposal import strategies
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.proposal.coverage import provenance

RANDOM_PREFIX = "random-"  # what the names of random layouts start with
SPARSEST = "sparsest"  # the strategy that takes the least dense heads, to show what the choice is worth
MATCH_BUDGET = "match-budget"  # as a threshold: the one at which the mean density is the budget's share of the heads

_MATCHED = 0.01  # by how much the mean density may miss the budget's share of the heads
_FAR = 1.75  # ratio of the budget's share to that of the price, or its inverse, from which they are far apart
_TIED = 1.5  # mean density over the budget's share from which the densest heads are called tied (reports/LOG.md)


def propose(
    table: HeadScores,
    budget: int | str | None = None,
    *,
    window: int | None = None,
    seed: int = 0,
    num_random: int = 3,
) -> dict[str, Layout]:
    """Layouts by strategy name: interleaved-first (A), interleaved-last (B), random-N (C), densest (D), sparsest.

    Args:
        table: densities.
        budget: number of global KV heads, or a share such as "25%"; by default the paper's share, 2 of 7 heads. The
            layer patterns take the nearest number of heads that whole layers can give.
        window: of the local heads; the table's by default, or 128.
        seed: of the first random layout; the next ones count up.
        num_random: how many random layouts.

    Raises:
        UserError: the budget is not 1 to the number of heads, seed or num_random is negative, or the window below 1.
    """
    heads = parse_budget(budget, table.num_heads)
    if seed < 0 or num_random < 0:
        raise UserError(f"seed and number of random layouts must be at least 0; found {seed} and {num_random}")
    if window is None:
        window = table.window or DEFAULT_WINDOW
    masks = {
        "interleaved-first": strategies.interleaved_first(*table.grid, heads),
        "interleaved-last": strategies.interleaved_last(*table.grid, heads),
        **{f"{RANDOM_PREFIX}{i}": strategies.random_heads(*table.grid, heads, seed + i) for i in range(num_random)},
        "densest": strategies.densest(table.values, heads),
        SPARSEST: strategies.sparsest(table.values, heads),
    }
    layouts = {}
    for name, mask in masks.items():
        layout = Layout.from_mask(mask, window=window, strategy=name)
        own_seed = seed + int(name.removeprefix(RANDOM_PREFIX)) if name.startswith(RANDOM_PREFIX) else None
        layouts[name] = Layout(layout.heads, layout.window, name, provenance(table, layout, heads, own_seed))
    return layouts


def resolve_tau(table: HeadScores, tau: str | None, budget: int | str | None) -> HeadScores:
    """The table at ``tau``: a number in [0, 1], or "match-budget" (mean density = budget / heads, or the nearest to it
    that a threshold gives; of a table that knows one threshold, that one). None: as it is.

    Raises:
        UserError: neither of these, or a table that knows no other threshold or holds no densities.
    """
    if tau is None:
        return table
    if not table.is_density:
        raise UserError(f"--tau needs densities; '{table.name}' holds scores of another kind, {table.signal}")
    if tau == MATCH_BUDGET:
        share = parse_budget(budget, table.num_heads) / table.num_heads
        return table if table.histogram is None else table.at_tau(rounded_tau(table.tau_for_density(share)))
    try:
        return table.at_tau(float(tau))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"tau '{tau}' is not a number in [0, 1] nor '{MATCH_BUDGET}'") from error


def unmatched(table: HeadScores, budget: int | str | None) -> str | None:
    """Says that no threshold has the mean density of the budget, if ``table``, at the nearest one, is far from it."""
    share = parse_budget(budget, table.num_heads) / table.num_heads
    if abs(table.mean - share) <= _MATCHED:
        return None
    known = "no threshold gives" if table.histogram is not None else "its one threshold does not give"
    return (
        f"'{table.name}': {known} the budget's mean density of {share:.2f}; at tau {table.tau:g}, which is taken, it "
        f"is {table.mean:.2f}"
    )


def layer_advice(table: HeadScores, granularity: str) -> str | None:
    """Says that the heads of a layer tie, where whole layers were measured and single heads are chosen."""
    measured = table.metadata.get("granularity")
    if measured not in ("layer", "mixed") or granularity == "layer":
        return None
    if measured == "mixed":
        return f"'{table.name}' has single heads of the layers that gain most; the heads of others tie"
    return f"'{table.name}' was measured by whole layers, whose heads tie: choose whole ones by --granularity layer"


def price_advice(table: HeadScores, budget: int | str | None) -> str | None:
    """Says when the table was learned for quite another budget: its values then tell of another choice."""
    share = parse_budget(budget, table.num_heads) / table.num_heads
    priced, learned_for = table.priced_at, table.metadata.get("budget")
    if priced is not None and not 1 / _FAR <= share / priced <= _FAR:
        return (
            f"the gates' price was to keep {priced:.0%} of the keys, and the budget is {share:.0%} of the heads: probe "
            f"again with --budget {share:.0%}, or gates.target_density: {share:.2g} in the recipe"
        )
    if learned_for is not None and not 1 / _FAR <= share * table.num_heads / learned_for <= _FAR:
        return (
            f"'{table.name}' was learned for {learned_for} global heads, and the budget is {share:.0%} of "
            f"{table.num_heads}: probe again with --budget {share:.0%}"
        )
    return None


def tie_advice(table: HeadScores, budget: int) -> str | None:
    """Says when the budget cuts through heads of equal values, of which the earlier ones are taken."""
    values = table.values.ravel()
    order = strategies.densest_first(table.values)
    if not 0 < budget < values.size or values[order[budget - 1]] != values[order[budget]]:
        return None
    equal = values == values[order[budget]]
    taken = int(equal[order[:budget]].sum())
    return (
        f"{int(equal.sum())} heads are tied at {values[order[budget]]:.4g}, and the budget takes {taken} of them, the "
        "first by layer: between these the table makes no choice"
    )


def default_window(table: HeadScores, window: int | None) -> str | None:
    """Says which window layouts have of which neither the table nor the caller says one."""
    if window is not None or table.window is not None:
        return None
    return f"window {DEFAULT_WINDOW}: '{table.name}' does not say one; give --window W if the layouts are for another"


def tau_advice(table: HeadScores, budget: int | str | None) -> str | None:
    """Says when the densest heads tie: the reference keeps far more than the budget allows, so tau cuts too low."""
    share = parse_budget(budget, table.num_heads) / table.num_heads
    if table.histogram is None or table.mean < _TIED * share:
        return None
    return (
        f"mean density {table.mean:.2f} at tau {table.tau:g} is {table.mean / share:.1f} times the budget's share of "
        f"heads ({share:.2f}): many heads keep nearly everything, and which of them the budget takes is near chance. "
        f"--tau {MATCH_BUDGET} compares the heads where the budget cuts"
    )
