"""What ``propose`` answers for one budget: the layouts, their density coverage and how sure it is, and their files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.signals import RECOMMENDED
from spkv_nas.base.locks import locked
from spkv_nas.base.names import check_name
from spkv_nas.base.progress import SILENT, Progress, Reporter
from spkv_nas.base.replace import replacing
from spkv_nas.base.tables import write_csv
from spkv_nas.proposal.constraints import CONSTRAINED, ROBUST
from spkv_nas.proposal.coverage import coverage, coverage_curve, domain_coverage, provenance
from spkv_nas.proposal.earlier import keep_other_budget, replaced_layouts
from spkv_nas.proposal.propose import RANDOM_PREFIX, propose, resolve_tau
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.proposal.stability import Bootstrap, Certainty, bootstrap
from spkv_nas.proposal.strategies import densest

_COVERAGE, _CURVE, _HEADS = "coverage.csv", "coverage-curve.csv", "heads.csv"


@dataclass(frozen=True, eq=False)
class Answer:
    """The layouts of one budget.

    Attributes:
        table: the densities, at the threshold that the layouts were chosen at.
        layouts: by name.
        rows: of ``coverage_table``.
        certainty: how sure the choice is; None where it cannot be told (``stability.caution`` says why).
    """

    table: HeadScores
    layouts: dict[str, Layout]
    rows: pd.DataFrame
    certainty: Certainty | None


@dataclass(frozen=True)
class RandomSpread:
    """Coverage of random layouts, in [0, 1]; the deviation of a single one is 0."""

    mean: float
    standard_deviation: float


def propose_for(
    table: HeadScores,
    requirements: Requirements | None = None,
    budget: int | str | None = None,
    *,
    tau: str | None = None,
    window: int | None = None,
    seed: int = 0,
    num_random: int = 3,
    others: Sequence[HeadScores] = (),
    progress: Progress | None = None,
) -> Answer:
    """Propose layouts by every strategy for a budget, and the one that meets the requirements, if there are any.

    Args:
        table: densities.
        requirements: none by default.
        budget: number of global heads, a share such as "25%", or with weights what the heads may weigh; by
            default the paper's share, 2 of 7 heads.
        tau: threshold to compare the heads at, see ``resolve_tau``; the table's own by default.
        window: of the local heads; the table's by default, or 128.
        seed, num_random: of the random layouts, see ``propose``.
        others: scores of the same heads by other signals; the heads that each scores highest are a layout of the
            signal's name, such as head-gates, whose coverage is counted in ``table`` like that of all others.
        progress: called with (resamples solved, resamples in all) where requirements have to be met in each.

    Raises:
        UserError: as ``Requirements.limit``, ``resolve_tau``, ``constraints.solve`` and ``propose``.
    """
    requirements = requirements or Requirements()
    limit = requirements.limit(table, budget, window)
    table = resolve_tau(table, tau, limit.heads(table))
    solved: dict[str, Layout] = {}
    if requirements.is_solved:
        layout = requirements.solve(table, limit, window)
        solved[layout.strategy] = layout
    heads = next(iter(solved.values())).num_global if limit.weights is not None else limit.heads(table)
    layouts = propose(table, heads, window=window, seed=seed, num_random=num_random)
    layouts |= {other.signal: _chosen_by(other, layouts["densest"].window, heads) for other in others} | solved
    resampled = bootstrap(table)
    certainty = None
    if resampled is not None:
        taken = {name: requirements.probability(resampled, limit, progress=progress) for name in solved}
        certainty = Certainty.of(resampled, layouts, heads, taken)
    return Answer(table, layouts, coverage_table(table, layouts, heads, resampled), certainty)


def _chosen_by(scores: HeadScores, window: int, heads: int) -> Layout:
    """Make the ``heads`` heads of the highest scores global, under the name of the signal."""
    layout = Layout.from_mask(densest(scores.values, heads), window=window, strategy=scores.signal)
    return Layout(layout.heads, window, scores.signal, provenance(scores, layout, heads, None))


def coverage_table(
    table: HeadScores, layouts: Mapping[str, Layout], heads: int, resampled: Bootstrap | None = None
) -> pd.DataFrame:
    """One row per layout, best coverage first, those above the budget last.

    Columns: strategy, num_global, density_percent, coverage, worst_domain (the lowest coverage of a domain),
    coverage_low and coverage_high (95 % interval; NaN without ``resampled``), note (why it has other than ``heads``
    global heads, or may not be the best).
    """
    rows = []
    for name, layout in layouts.items():
        low, high = (math.nan, math.nan) if resampled is None else resampled.coverage(layout.global_mask)
        rows.append(
            {
                "strategy": name,
                "num_global": layout.num_global,
                "density_percent": round(100 * layout.num_global / layout.num_heads, 2),
                "coverage": round(coverage(table, layout), 4),
                "worst_domain": round(min(domain_coverage(table, layout).values()), 4),
                "coverage_low": round(low, 4),
                "coverage_high": round(high, 4),
                "note": _note(layout, heads),
            }
        )
    table_rows = pd.DataFrame(rows).sort_values("coverage", ascending=False, kind="stable")
    is_above = (table_rows["num_global"] > heads).sort_values(kind="stable")
    return table_rows.loc[is_above.index].reset_index(drop=True)


def uneven_budgets(rows: pd.DataFrame, heads: int) -> str | None:
    """Say which layouts of a ``coverage_table`` have not ``heads`` global heads, so that coverages do not compare."""
    budget = rows.set_index("strategy")["num_global"]
    other = budget[budget != heads]
    if other.empty:
        return None
    named = ", ".join(f"{name} ({number})" for name, number in other.items())
    return f"not {heads} global heads: {named}; coverage grows with their number, so compare layouts of one number"


def random_spread(rows: pd.DataFrame) -> RandomSpread | None:
    """Of the random layouts of a ``coverage_table``; None without any."""
    values = rows.loc[rows["strategy"].str.startswith(RANDOM_PREFIX), "coverage"]
    if values.empty:
        return None
    return RandomSpread(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0)


def write_proposal(folder: Path, answer: Answer, reporter: Reporter = SILENT) -> None:
    """Write every ``<strategy>.yaml``, ``coverage.csv``, ``coverage-curve.csv`` and, where known, ``heads.csv``.

    All together take the place of an earlier proposal's. One for another budget is kept in a folder of its own,
    ``<budget>-heads/``; of the same budget ``reporter`` is told which layouts are replaced. What an earlier proposal
    left and this one does not have is removed: random layouts, the solved one, that of the recommended signal,
    ``heads.csv``. Of two processes the second waits.
    """
    names = [f"{check_name(name, 'the layout')}.yaml" for name in answer.layouts]
    budget = answer.layouts["densest"].num_global
    with locked(folder, "writes layouts", reporter.announce):
        random = [file.name for file in folder.glob(f"{RANDOM_PREFIX}*.yaml")]
        optional = [f"{name}.yaml" for name in (CONSTRAINED, ROBUST, RECOMMENDED)]
        stale = [*random, *optional, _HEADS]
        files = {*names, *stale, _COVERAGE, _CURVE}
        if not keep_other_budget(folder, files, budget, reporter) and (
            replaced := replaced_layouts(folder, answer.layouts, files)
        ):
            reporter.caution(f"replaced other layouts for {budget} global heads in {folder}: {', '.join(replaced)}")
        with replacing(folder, stale=stale) as new:
            for name, layout in zip(names, answer.layouts.values(), strict=True):
                layout.write(new / name)
            write_csv(new / _COVERAGE, answer.rows, digits=None)
            write_csv(new / _CURVE, coverage_curve(answer.table))
            if answer.certainty is not None:
                write_csv(new / _HEADS, answer.certainty.heads(answer.table))


def _note(layout: Layout, heads: int) -> str:
    """What a layout does not reach: the whole budget, or the proof that it is the best."""
    if "constraints" not in layout.provenance:
        if layout.num_global == heads:
            return ""
        return (
            f"whole layers cannot give {heads} heads; the nearest is {layout.num_global} "
            f"({layout.num_global // layout.num_kv_heads} layers)"
        )
    notes = [] if layout.num_global == heads else [f"the constraints leave {layout.num_global} of {heads} heads"]
    if (gap := layout.provenance.get("gap")) is not None:
        notes.append(f"not proven the best, but within {100 * float(str(gap)):.2g} % of it")
    return "; ".join(notes)
