"""Propose the layouts that a search starts from, by the strategies of ``proposal``."""

from __future__ import annotations

from dataclasses import replace

from spkv_nas.artifacts.layout import Layout
from spkv_nas.proposal.constraints import CONSTRAINED, solve
from spkv_nas.proposal.propose import layout_by
from spkv_nas.proposal.registry import STRATEGIES
from spkv_nas.search.space import Space


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
