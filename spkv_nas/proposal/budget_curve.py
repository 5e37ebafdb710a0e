"""Compute the best layouts of several budgets, their coverage, and its knee, where heads fall below average."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import locks, tables, workspace
from spkv_nas.base.progress import SILENT, Progress, Reporter
from spkv_nas.proposal import earlier, propose, strategies
from spkv_nas.proposal.budget import parse_budgets
from spkv_nas.proposal.coverage import coverage, coverage_curve, domain_coverage
from spkv_nas.proposal.requirements import Limit, Requirements
from spkv_nas.proposal.stability import Bootstrap, bootstrap, knee


@dataclass(frozen=True)
class Knee:
    """The knee of a budget curve: a budget in global heads, and the reason in words."""

    budget: int
    meaning: str


@dataclass(frozen=True, eq=False)
class BudgetCurve:
    """The best layout at each of several budgets."""

    table: HeadScores  # densities at the threshold used to choose the layouts
    # one row per budget with columns budget, num_global, coverage, worst_domain (lowest per-domain coverage),
    # coverage_low and coverage_high (95 % interval), random (expected coverage of as many random heads), kv_bytes; NaN
    # where unknown. With an engine also max_heads_same_memory, the largest number of global heads that takes no more
    # memory
    rows: pd.DataFrame
    layouts: dict[str, Layout]  # layouts by name, such as "densest-18"
    knee: Knee  # knee of the curve


def curve_for(
    table: HeadScores,
    requirements: Requirements | None,
    budget: str,
    *,
    tau: str | None = None,
    window: int | None = None,
    progress: Progress | None = None,
) -> BudgetCurve:
    """Compute the curve over budgets given as text, such as "6..40" or "12,18,24".

    Arguments are those of ``propose_for``. Raises ``UserError``: as ``parse_budgets``, ``resolve_tau``,
    ``budget_curve``.
    """
    budgets = parse_budgets(budget, table.num_candidates)
    table = propose.resolve_tau(table, tau, budgets[0])
    return budget_curve(
        table, requirements or Requirements(), budgets, resampled=bootstrap(table), window=window, progress=progress
    )


def budget_curve(
    table: HeadScores,
    requirements: Requirements,
    budgets: Sequence[int],
    *,
    resampled: Bootstrap | None = None,
    window: int | None = None,
    progress: Progress | None = None,
) -> BudgetCurve:
    """Compute the curve over ascending budgets in global heads; ``resampled`` gives intervals.

    Arguments are those of ``propose_for``. Raises ``UserError``: a budget is not feasible under the requirements.
    """
    cost = requirements.cache_cost(table, window)
    rows, layouts = [], {}
    # Solve for one layout per budget and measure its coverage
    for number, budget in enumerate(budgets, 1):
        if requirements.is_solved:
            layout = requirements.solve(table, Limit(budget), window)
        else:
            layout = propose.densest_layout(table, budget, window=window)
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
        if requirements.serving is not None:
            rows[-1]["max_heads_same_memory"] = requirements.max_heads_same_memory(table, layout.num_global, window)
        name = f"{layout.strategy}-{budget}"
        layouts[name] = replace(layout, strategy=name)
        if progress is not None:
            progress(number, len(budgets))
    # Locate the knee
    curve = pd.DataFrame(rows)
    return BudgetCurve(table, curve, layouts, find_knee(table, requirements, curve))


def find_knee(table: HeadScores, requirements: Requirements, rows: pd.DataFrame) -> Knee:
    """Locate the knee of ``BudgetCurve.rows``.

    For the densest heads this is ``stability.knee``, inside the range or not. For solved layouts it is the budget of
    the range whose coverage exceeds that of as many random heads by the most.
    """
    if not requirements.is_solved:
        return Knee(knee(table), "beyond it each further head adds less than average")
    best = rows.iloc[int((rows["coverage"] - rows["random"]).to_numpy().argmax())]
    caveat = (
        "; this is an end of the range, so the true knee may lie outside it" if best.name in (0, len(rows) - 1) else ""
    )
    return Knee(int(best["budget"]), f"at this budget coverage exceeds that of random heads by the most{caveat}")


def write_budgets(folder: Path, curve: BudgetCurve, reporter: Reporter = SILENT) -> None:
    """Write ``budgets.csv`` and ``budgets/<strategy>-<budget>.yaml``, locked; warn of and remove earlier layouts."""
    with locks.locked(folder, "writes layouts", reporter.announce):
        earlier.replace_layouts(folder / workspace.BUDGETS, curve.layouts, reporter)
        tables.write_csv(folder / "budgets.csv", curve.rows, digits=10)


def coverage_by_budget(table: HeadScores) -> pd.DataFrame | None:
    """Return coverage in [0, 1] by budget: columns budget, densest, random, and each pattern of whole layers.

    The patterns spend whole layers, so they are NaN at other budgets. None if no head keeps anything.
    """
    if table.mean == 0.0:
        return None
    curve = coverage_curve(table)
    total = table.density.sum()
    # Add the patterns of whole layers, at the budgets that they can have
    for pattern in (strategy for strategy in strategies.STRATEGIES if strategy.whole_layers):
        curve[pattern.name] = np.nan
        for layers in range(1, table.num_layers + 1):
            mask = pattern.choose(table, round(layers * table.num_heads / table.num_layers))
            curve.loc[int(mask.sum()) - 1, pattern.name] = table.density[mask].sum() / total
    return curve
