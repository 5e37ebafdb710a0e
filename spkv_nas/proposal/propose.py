"""Propose: layouts for a budget of global heads, by every strategy, with their density coverage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import write_atomic
from spkv_nas.proposal import strategies
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.proposal.coverage import coverage, coverage_curve, domain_coverage, provenance
from spkv_nas.proposal.stability import Bootstrap

_TIED = 1.5  # mean density over the budget's share from which the densest heads are called tied (reports/LOG.md)


def propose(
    table: DensityTable,
    budget: int | str = 18,
    *,
    window: int | None = None,
    seed: int = 0,
    num_random: int = 3,
) -> dict[str, Layout]:
    """Layouts by strategy name: interleaved-first (A), interleaved-last (B), random-N (C), densest (D), sparsest.

    Args:
        table: densities.
        budget: number of global KV heads, or a share such as "25%". The layer patterns take the nearest number of
            heads that whole layers can give.
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
    shape = (table.num_layers, table.num_kv_heads)
    masks = {
        "interleaved-first": strategies.interleaved_first(*shape, heads),
        "interleaved-last": strategies.interleaved_last(*shape, heads),
        **{f"random-{i}": strategies.random_heads(*shape, heads, seed + i) for i in range(num_random)},
        "densest": strategies.densest(table.density, heads),
        "sparsest": strategies.sparsest(table.density, heads),
    }
    layouts = {}
    for name, mask in masks.items():
        layout = Layout.from_mask(mask, window=window, strategy=name)
        own_seed = seed + int(name.removeprefix("random-")) if name.startswith("random-") else None
        layouts[name] = Layout(layout.heads, layout.window, name, provenance(table, layout, heads, own_seed))
    return layouts


def coverage_table(
    table: DensityTable, layouts: dict[str, Layout], budget: int | str, bootstrap: Bootstrap | None = None
) -> pd.DataFrame:
    """One row per layout, best coverage first: strategy, num_global, density_percent, coverage, worst_domain (the
    lowest coverage of a domain), coverage_low and coverage_high (95 % interval; NaN without ``bootstrap``), note.
    """
    heads = parse_budget(budget, table.num_heads)
    rows = []
    for name, layout in layouts.items():
        note = ""
        if "constraints" in layout.provenance:
            note = _note(layout, heads)
        elif layout.num_global != heads:
            note = (
                f"whole layers cannot give {heads} heads; the nearest is {layout.num_global} "
                f"({layout.num_global // layout.num_kv_heads} layers)"
            )
        low, high = (math.nan, math.nan) if bootstrap is None else bootstrap.coverage(layout.global_mask)
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
    return pd.DataFrame(rows).sort_values("coverage", ascending=False, kind="stable").reset_index(drop=True)


def _note(layout: Layout, heads: int) -> str:
    """What a solved layout does not reach: the whole budget, or the proof that it is the best."""
    notes = [] if layout.num_global == heads else [f"the constraints leave {layout.num_global} of {heads} heads"]
    if (gap := layout.provenance.get("gap")) is not None:
        notes.append(f"not proven the best, but within {100 * float(str(gap)):.2g} % of it")
    return "; ".join(notes)


def resolve_tau(table: DensityTable, tau: str | None, budget: int | str) -> DensityTable:
    """The table at ``tau``: a number in [0, 1], or "match-budget" (mean density = budget / heads). None: as it is."""
    if tau is None:
        return table
    if table.signal != "density":
        raise UserError(f"--tau needs densities; '{table.name}' holds scores of another kind, {table.signal}")
    if tau == "match-budget":
        return table.at_tau(round(table.tau_for_density(parse_budget(budget, table.num_heads) / table.num_heads), 4))
    try:
        return table.at_tau(float(tau))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"tau '{tau}' is not a number in [0, 1] nor 'match-budget'") from error


def at_layouts_tau(table: DensityTable, layouts: Mapping[str, Layout]) -> DensityTable:
    """The table at the threshold that the layouts were proposed at, which their coverage must be counted at.

    The table as it is if no layout says one, if they differ, or if it knows no other threshold than its own.
    """
    taus = {tau for layout in layouts.values() if isinstance(tau := layout.provenance.get("tau"), float | int)}
    if len(taus) != 1 or taus == {round(table.tau, 4)} or table.histogram is None:
        return table
    return table.at_tau(float(taus.pop()))


def tau_advice(table: DensityTable, budget: int | str) -> str | None:
    """Says when the densest heads tie: the reference keeps far more than the budget allows, so tau cuts too low."""
    share = parse_budget(budget, table.num_heads) / table.num_heads
    if table.histogram is None or table.mean < _TIED * share:
        return None
    return (
        f"mean density {table.mean:.2f} at tau {table.tau:g} is {table.mean / share:.1f} times the budget's share of "
        f"heads ({share:.2f}): many heads keep nearly everything, and which of them the budget takes is near chance. "
        "--tau match-budget compares the heads where the budget cuts"
    )


def write_proposal(
    folder: Path,
    table: DensityTable,
    layouts: dict[str, Layout],
    budget: int | str,
    bootstrap: Bootstrap | None = None,
) -> pd.DataFrame:
    """Write every ``<strategy>.yaml``, ``coverage.csv`` and ``coverage-curve.csv``; returns the coverage table."""
    rows = coverage_table(table, layouts, budget, bootstrap)
    for name, layout in layouts.items():
        layout.write(folder / f"{name}.yaml")
    write_atomic(folder / "coverage.csv", rows.to_csv(index=False))
    write_atomic(folder / "coverage-curve.csv", coverage_curve(table).to_csv(index=False, float_format="%.6g"))
    return rows


def random_spread(rows: pd.DataFrame) -> tuple[float, float] | None:
    """(mean, standard deviation) of coverage over the random layouts of a coverage table; None without any."""
    values = rows.loc[rows["strategy"].str.startswith("random-"), "coverage"]
    return (float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0) if len(values) else None
