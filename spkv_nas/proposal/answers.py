"""Answer ``propose``: layouts for one budget, or the curve over several, with their coverage and their files."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from spkv_nas.artifacts import defaults, head_scores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.tried_layouts import RECOMMENDED, TriedLayout
from spkv_nas.base import locks, tables
from spkv_nas.base.names import check_name
from spkv_nas.base.progress import SILENT, Progress, Reporter
from spkv_nas.base.replace import replacing
from spkv_nas.cost.cache_cost import CacheCost, EngineCost
from spkv_nas.proposal import earlier, strategies, windows
from spkv_nas.proposal.budget import parse_budgets
from spkv_nas.proposal.constraints import CONSTRAINED, ROBUST, Constraints
from spkv_nas.proposal.coverage import (
    Bootstrap,
    Certainty,
    bootstrap,
    coverage,
    coverage_curve,
    domain_coverage,
    knee,
    provenance,
)
from spkv_nas.proposal.propose import densest_layout, propose, resolve_tau
from spkv_nas.proposal.requirements import Limit, Requirements
from spkv_nas.proposal.solutions import SeveralSolutions, Solutions, find_solutions

_COVERAGE = "coverage.csv"
_CURVE = "coverage-curve.csv"
_HEADS = "heads.csv"


@dataclass(frozen=True, eq=False)
class Answer:
    """The layouts proposed for one budget."""

    table: head_scores.HeadScores  # densities at the threshold used to choose the layouts
    layouts: dict[str, Layout]  # layouts by strategy name
    # the table of ``coverage_table``; with an engine also kv_bytes, missing where it does not run a layout
    rows: pd.DataFrame
    # stability of the choice of heads under resampling; None where it cannot be estimated (``coverage.caution`` says
    # why)
    certainty: Certainty | None
    # further layouts that differ from the best in many heads; None where they were not requested
    solutions: Solutions | None = None
    # Name of the layout that lost least of those that the probe compared; None: none
    recommended: str | None = None


@dataclass(frozen=True)
class RandomSpread:
    """Mean and standard deviation of the random layouts' coverage, in [0, 1]; the deviation of a single one is 0."""

    mean: float
    standard_deviation: float


def propose_for(
    table: head_scores.HeadScores,
    requirements: Requirements | None = None,
    budget: int | str | None = None,
    *,
    tau: str | None = None,
    window: int | None = None,
    seed: int = 0,
    num_random: int = strategies.NUM_RANDOM,
    others: Sequence[head_scores.HeadScores] = (),
    solutions: SeveralSolutions | None = None,
    progress: Progress | None = None,
) -> Answer:
    """Propose layouts by every strategy for a budget, plus one that meets the requirements if there are any.

    Args:
        table: head densities.
        requirements: constraints and further options; none by default.
        budget: number of global heads, a share such as "25%", or with weights their total; defaults to 2 of 7 heads.
        tau: density threshold, see ``resolve_tau``; defaults to the table's own.
        window: local attention window in tokens; defaults to the table's, or 128.
        seed: random seed of the random layouts, see ``propose``.
        num_random: number of layouts of each random strategy.
        others: scores of the same heads by other signals; the highest-scoring heads of each form a layout.
        solutions: request for several good layouts that differ from each other, see ``find_solutions``.
        progress: called with (resamples solved, number of resamples) if requirements have to be met in each resample.

    Raises ``UserError`` as ``Requirements.limit``, ``resolve_tau``, ``constraints.solve`` and ``propose``.
    """
    # Resolve what is asked for; errors come before anything is solved
    requirements = requirements or Requirements()
    table = requirements.at_best_window(table, window)
    cost = requirements.cache_cost(table, window)
    limit = requirements.limit(table, budget, window)
    table = resolve_tau(table, tau, limit.heads(table))
    limit, solved = _solve(requirements, table, limit, window)
    heads = limit.heads(table)
    if limit.weights is not None:
        heads = next(layout.num_global for layout in solved.values())
    tried = requirements.compared(table, limit, window)
    # Choose heads by every strategy and by other signals
    layouts = propose(table, heads, window=window, seed=seed, num_random=num_random)
    window = layouts[strategies.DENSEST.name].window
    layouts |= _of_signals(others, heads, window)
    layouts |= solved
    layouts |= requirements.window_per_head(table, limit, window)
    layouts |= _of_probe(table, tried)
    # Bootstrap confidence intervals over the probe's documents
    resampled = bootstrap(table)
    certainty = _certainty(requirements, resampled, limit, layouts, solved, heads, progress)
    rows = coverage_table(table, layouts, heads, resampled, requirements.constraints)
    rows = _with_measured(rows, tried)
    rows = _with_kv_bytes(rows, layouts, requirements, table, window, cost)
    # Find further layouts if they are requested
    several = None
    if solutions is not None:
        best = next(iter(solved.values()), layouts[strategies.DENSEST.name])
        several = find_solutions(table, requirements, limit, best, solutions, resampled=resampled)
    recommended = table.record.recommended if tried else None
    return Answer(table, layouts, rows, certainty, several, recommended)


def _solve(
    requirements: Requirements,
    table: head_scores.HeadScores,
    limit: Limit,
    window: int | None,
) -> tuple[Limit, dict[str, Layout]]:
    """Return the layout that meets the requirements, by name, and the limit that it fits in; no layout without any."""
    if not requirements.is_solved:
        return limit, {}
    limit = requirements.fitted(table, limit, window)
    layout = requirements.solve(table, limit, window)
    return limit, {layout.strategy: layout}


def _of_signals(
    others: Sequence[head_scores.HeadScores], heads: int, window: int
) -> dict[str, Layout]:
    """Return the layout of the heads of highest score for each of other signals, by the signal's name."""
    return {
        scores.signal: densest_layout(scores, heads, name=scores.signal, window=window)
        for scores in others
    }


def _certainty(
    requirements: Requirements,
    resampled: Bootstrap | None,
    limit: Limit,
    layouts: Mapping[str, Layout],
    solved: Mapping[str, Layout],
    heads: int,
    progress: Progress | None,
) -> Certainty | None:
    """Return how certain the choice of heads is, solving again in each resample for the layouts in ``solved``."""
    if resampled is None:
        return None
    probability = {
        name: requirements.probability(resampled, limit, progress=progress) for name in solved
    }
    return Certainty.of(resampled, layouts, heads, probability)


def _with_kv_bytes(
    rows: pd.DataFrame,
    layouts: Mapping[str, Layout],
    requirements: Requirements,
    table: head_scores.HeadScores,
    window: int | None,
    cost: CacheCost | None,
) -> pd.DataFrame:
    """Add the bytes of each layout if an engine or costs of windows ask for them.

    In an engine they are those that it plans, missing where it does not run a layout.
    """
    in_order = [layouts[name] for name in rows["strategy"]]
    sizes: list[int | None] = []
    if isinstance(cost, EngineCost):
        for layout in in_order:
            plan = cost.layout_plan(layout, table.layers)
            sizes.append(None if plan is None else plan.memory(cost.batch))
    elif table.window_costs is not None:
        of_layouts = requirements.cost_of_layouts(table, window)
        sizes += [of_layouts.layout_bytes(layout, table.layers) for layout in in_order]
    else:
        return rows
    return rows.assign(kv_bytes=pd.array(sizes, dtype="Int64"))


def _of_probe(table: head_scores.HeadScores, tried: Sequence[TriedLayout]) -> dict[str, Layout]:
    """Return the layouts that a probe compared, by name, with the provenance of the probe's layouts."""
    layouts = {}
    for row in tried:
        origin = provenance(table, row.layout, row.layout.num_global)
        origin |= {"memory_share": table.record.memory, "context": table.record.context}
        layouts[row.name] = replace(row.layout, provenance=origin)
    return layouts


def _with_measured(rows: pd.DataFrame, tried: Sequence[TriedLayout]) -> pd.DataFrame:
    """Add what layouts were predicted and measured to lose, in percent of NLL; those that lose least come first."""
    by_name = {row.name: row for row in tried}
    if not by_name:
        return rows
    for column in ("predicted", "change", "standard_error"):
        values = [
            getattr(by_name[name], column) if name in by_name else math.nan
            for name in rows["strategy"]
        ]
        rows[column] = np.round(values, 4)
    # Layouts that were not compared keep their order, after those that were
    places = {name: place for place, name in enumerate(by_name)}
    place = rows["strategy"].map(lambda name: places.get(name, len(places)))
    return rows.loc[place.sort_values(kind="stable").index].reset_index(drop=True)


def coverage_table(
    table: head_scores.HeadScores,
    layouts: Mapping[str, Layout],
    heads: int,
    resampled: Bootstrap | None = None,
    constraints: Constraints | None = None,
) -> pd.DataFrame:
    """Tabulate layouts by strategy, best coverage first and those above the budget of ``heads`` last.

    Returns one row per layout with columns strategy, num_global, density_percent, coverage, worst_domain (lowest
    per-domain coverage), coverage_low and coverage_high (95 % interval; NaN without ``resampled``), note (why the
    layout does not have ``heads`` global heads, which ``constraints`` it breaks, or that it may not be optimal).
    """
    # Measure each layout, noting an earlier one with the same heads
    rows = []
    first_names: dict[str, str] = {}
    for name, layout in layouts.items():
        low = math.nan
        high = math.nan
        if resampled is not None and not layout.windows:
            low, high = resampled.coverage(layout.global_mask)
        first_name = first_names.setdefault(layout.content, name)
        note = f"the same heads as {first_name}"
        if first_name == name:
            note = _note(layout, heads, constraints or Constraints())
        rows.append(
            {
                "strategy": name,
                "num_global": layout.num_global,
                "density_percent": round(100 * layout.num_global / layout.num_heads, 2),
                "coverage": round(coverage(table, layout), 4),
                "worst_domain": round(min(domain_coverage(table, layout).values()), 4),
                "coverage_low": round(low, 4),
                "coverage_high": round(high, 4),
                "note": note,
            }
        )
    # Sort by coverage, layouts above the budget last; several windows are of equal memory with other numbers of heads
    table_rows = pd.DataFrame(rows).sort_values("coverage", ascending=False, kind="stable")
    has_several = table_rows["strategy"].map(lambda name: bool(layouts[name].windows))
    is_above = ((table_rows["num_global"] > heads) & ~has_several).sort_values(kind="stable")
    return table_rows.loc[is_above.index].reset_index(drop=True)


def uneven_budgets(rows: pd.DataFrame, heads: int) -> str | None:
    """Warn of layouts in a ``coverage_table`` without exactly ``heads`` global heads: coverages do not compare."""
    # Layouts of equal memory, which were compared on text, have unequal numbers of global heads
    if "change" in rows:
        rows = rows[rows["change"].isna()]
    num_global = rows.set_index("strategy")["num_global"]
    num_global = num_global.drop(windows.WINDOW_PER_HEAD, errors="ignore")
    deviating = num_global[num_global != heads]
    if deviating.empty:
        return None
    uneven = ", ".join(f"{name} ({number})" for name, number in deviating.items())
    return (
        f"these layouts do not have {heads} global heads: {uneven}; "
        "more global heads cover more and lose less, so compare only layouts with equal numbers"
    )


def random_spread(rows: pd.DataFrame) -> RandomSpread | None:
    """Return mean and deviation of the random layouts in a ``coverage_table``; None if there are none."""
    is_random = [strategies.strategy_of(name) is strategies.RANDOM for name in rows["strategy"]]
    values = rows.loc[is_random, "coverage"]
    if values.empty:
        return None
    deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return RandomSpread(float(values.mean()), deviation)


def write_proposal(folder: Path, answer: Answer, reporter: Reporter = SILENT) -> None:
    """Write ``<strategy>.yaml`` per layout, ``coverage.csv``, ``coverage-curve.csv`` and, if known, ``heads.csv``.

    The recommended layout, if there is one, is also ``recommended.yaml``.

    The files replace those of an earlier proposal all at once, in a locked folder, and files that the new proposal
    lacks are removed (random layouts, the solved layout, that of the recommended signal, ``heads.csv``). An earlier
    proposal for a different budget is first copied to ``<budget>-heads/``, layouts of other inputs to ``earlier/``.
    """
    layouts = dict(answer.layouts)
    if answer.recommended is not None:
        layouts[RECOMMENDED] = layouts[answer.recommended]
    names = [f"{check_name(name, 'the layout')}.yaml" for name in layouts]
    budget = answer.layouts[strategies.DENSEST.name].num_global
    with locks.locked(folder, "writes layouts", reporter.announce):
        stale = _optional_files(folder)
        files = {*names, *stale, _COVERAGE, _CURVE}
        # Keep or report an earlier proposal
        if not earlier.keep_other_budget(folder, files, budget, reporter):
            earlier.keep_layouts(folder, layouts, files, reporter)
        # Write layouts and tables
        with replacing(folder, stale=stale) as new:
            for name, layout in zip(names, layouts.values(), strict=True):
                layout.write(new / name)
            tables.write_csv(new / _COVERAGE, answer.rows, digits=None)
            tables.write_csv(new / _CURVE, coverage_curve(answer.table))
            if answer.certainty is not None:
                tables.write_csv(new / _HEADS, answer.certainty.heads(answer.table))


def _optional_files(folder: Path) -> list[str]:
    """Return the names of files in a folder of layouts that a new proposal removes unless it writes them."""
    kinds = (CONSTRAINED, ROBUST, windows.WINDOW_PER_HEAD, defaults.RECOMMENDED, RECOMMENDED)
    names = [f"{kind}.yaml" for kind in kinds]
    patterns = [
        f"{strategy.name}-*.yaml" for strategy in strategies.STRATEGIES if strategy.is_random
    ]
    of_windows = (windows.ONE_WINDOW, windows.WHOLE_LAYERS, windows.BY_GATES)
    patterns += [f"{kind}*.yaml" for kind in of_windows]
    for pattern in patterns:
        names += [file.name for file in folder.glob(pattern)]
    return [*names, _HEADS]


def _note(layout: Layout, heads: int, constraints: Constraints) -> str:
    """Explain why a layout misses the budget or a constraint, or is not proven optimal; empty if none applies."""
    if layout.windows:
        return layout.reach
    if "constraints" not in layout.provenance:
        return _note_of_strategy(layout, heads, constraints)
    # Explain a solution of the integer program
    notes = []
    if layout.num_global != heads:
        notes.append(f"the constraints allow only {layout.num_global} of {heads} global heads")
    gap = layout.provenance.get("gap")
    if gap is not None:
        percent = f"{100 * float(str(gap)):.2g} %"
        notes.append(f"not proven optimal, but within {percent} of the optimum")
    return "; ".join(notes)


def _note_of_strategy(layout: Layout, heads: int, constraints: Constraints) -> str:
    """Explain why a layout that was chosen without the constraints breaks one or misses the budget."""
    notes = [f"violates {option}" for option in constraints.broken_by(layout)]
    if layout.num_global == heads:
        return "; ".join(notes)
    strategy = strategies.strategy_of(layout.strategy)
    if strategy is not None and strategy.whole_layers:
        notes.append(
            f"{heads} global heads are not a whole number of layers; "
            f"the nearest is {layout.num_global} ({len(layout.global_layers)} of "
            f"{layout.num_layers} layers)"
        )
    else:
        notes.append(f"{layout.strategy} makes {layout.num_global} heads global instead of {heads}")
    return "; ".join(notes)


@dataclass(frozen=True)
class Knee:
    """The knee of a budget curve: a budget in global heads, and the reason in words."""

    budget: int
    meaning: str


@dataclass(frozen=True, eq=False)
class BudgetCurve:
    """The best layout at each of several budgets."""

    table: head_scores.HeadScores  # densities at the threshold used to choose the layouts
    # one row per budget with columns budget, num_global, coverage, worst_domain (lowest per-domain coverage),
    # coverage_low and coverage_high (95 % interval), random (expected coverage of as many random heads), kv_bytes; NaN
    # where unknown. With an engine also max_heads_same_memory, the largest number of global heads that takes no more
    # memory
    rows: pd.DataFrame
    layouts: dict[str, Layout]  # layouts by name, such as "densest-18"
    knee: Knee  # knee of the curve


def curve_for(
    table: head_scores.HeadScores,
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
    table = resolve_tau(table, tau, budgets[0])
    return budget_curve(
        table,
        requirements or Requirements(),
        budgets,
        resampled=bootstrap(table),
        window=window,
        progress=progress,
    )


def budget_curve(
    table: head_scores.HeadScores,
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
    rows = []
    layouts = {}
    # Solve for one layout per budget and measure its coverage
    for number, budget in enumerate(budgets, 1):
        if requirements.is_solved:
            layout = requirements.solve(table, Limit(budget), window)
        else:
            layout = densest_layout(table, budget, window=window)
        low = np.nan
        high = np.nan
        if resampled is not None:
            low, high = resampled.coverage(layout.global_mask)
        kv_bytes: float = np.nan
        if cost is not None:
            kv_bytes = cost.total(layout.num_global, table.num_heads)
        row = {
            "budget": budget,
            "num_global": layout.num_global,
            "coverage": coverage(table, layout),
            "worst_domain": min(domain_coverage(table, layout).values()),
            "coverage_low": low,
            "coverage_high": high,
            "random": layout.num_global / table.num_heads,
            "kv_bytes": kv_bytes,
        }
        if requirements.serving is not None:
            row["max_heads_same_memory"] = requirements.max_heads_same_memory(
                table, layout.num_global, window
            )
        rows.append(row)
        name = f"{layout.strategy}-{budget}"
        layouts[name] = replace(layout, strategy=name)
        if progress is not None:
            progress(number, len(budgets))
    # Locate the knee
    curve = pd.DataFrame(rows)
    return BudgetCurve(table, curve, layouts, find_knee(table, requirements, curve))


def find_knee(
    table: head_scores.HeadScores, requirements: Requirements, rows: pd.DataFrame
) -> Knee:
    """Locate the knee of ``BudgetCurve.rows``.

    For the densest heads this is ``coverage.knee``, inside the range or not. For solved layouts it is the budget of
    the range whose coverage exceeds that of as many random heads by the most.
    """
    if not requirements.is_solved:
        return Knee(knee(table), "beyond it each further head adds less than average")
    excess = (rows["coverage"] - rows["random"]).to_numpy()
    best = int(excess.argmax())
    meaning = "at this budget coverage exceeds that of random heads by the most"
    if best in (0, len(rows) - 1):
        meaning += "; this is an end of the range, so the true knee may lie outside it"
    return Knee(int(rows["budget"].iloc[best]), meaning)


def coverage_by_budget(table: head_scores.HeadScores) -> pd.DataFrame | None:
    """Return coverage in [0, 1] by budget: columns budget, densest, random, and each pattern of whole layers.

    The patterns spend whole layers, so they are NaN at other budgets. None if no head keeps anything.
    """
    if table.mean == 0.0:
        return None
    curve = coverage_curve(table)
    total = table.density.sum()
    # Add the patterns of whole layers, at the budgets that they can have
    for pattern in strategies.STRATEGIES:
        if not pattern.whole_layers:
            continue
        curve[pattern.name] = np.nan
        for layers in range(1, table.num_layers + 1):
            heads = round(layers * table.num_heads / table.num_layers)
            mask = pattern.choose(table, heads)
            row = int(mask.sum()) - 1
            curve.loc[row, pattern.name] = table.density[mask].sum() / total
    return curve
