"""Propose: layouts for a budget of global heads, by every strategy, with their density coverage."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from spkv_nas import __version__
from spkv_nas.density import DensityTable
from spkv_nas.errors import UserError
from spkv_nas.files import write_atomic
from spkv_nas.layout import Layout
from spkv_nas.search import strategies
from spkv_nas.search.budget import parse_budget
from spkv_nas.search.coverage import coverage, coverage_curve

DEFAULT_WINDOW = 128


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
        provenance = {
            "probe": table.name,
            "budget": heads,
            "coverage": round(coverage(table, layout), 4),
            "tau": round(table.tau, 4),
            "seed": seed + int(name.removeprefix("random-")) if name.startswith("random-") else None,
            "created_by": f"spkv-nas {__version__}",
        }
        layouts[name] = Layout(layout.heads, layout.window, name, provenance)
    return layouts


def coverage_table(table: DensityTable, layouts: dict[str, Layout], budget: int | str) -> pd.DataFrame:
    """One row per layout, best coverage first: strategy, num_global, density_percent, coverage, note."""
    heads = parse_budget(budget, table.num_heads)
    rows = []
    for name, layout in layouts.items():
        note = ""
        if layout.num_global != heads:
            note = (
                f"whole layers cannot give {heads} heads; the nearest is {layout.num_global} "
                f"({layout.num_global // layout.num_kv_heads} layers)"
            )
        rows.append(
            {
                "strategy": name,
                "num_global": layout.num_global,
                "density_percent": round(100 * layout.num_global / layout.num_heads, 2),
                "coverage": round(coverage(table, layout), 4),
                "note": note,
            }
        )
    return pd.DataFrame(rows).sort_values("coverage", ascending=False, kind="stable").reset_index(drop=True)


def resolve_tau(table: DensityTable, tau: str | None, budget: int | str) -> DensityTable:
    """The table at ``tau``: a number in [0, 1], or "match-budget" (mean density = budget / heads). None: as it is."""
    if tau is None:
        return table
    if tau == "match-budget":
        return table.at_tau(table.tau_for_density(parse_budget(budget, table.num_heads) / table.num_heads))
    try:
        return table.at_tau(float(tau))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"tau '{tau}' is not a number in [0, 1] nor 'match-budget'") from error


def write_proposal(folder: Path, table: DensityTable, layouts: dict[str, Layout], budget: int | str) -> pd.DataFrame:
    """Write every ``<strategy>.yaml``, ``coverage.csv`` and ``coverage-curve.csv``; returns the coverage table."""
    rows = coverage_table(table, layouts, budget)
    for name, layout in layouts.items():
        layout.write(folder / f"{name}.yaml")
    write_atomic(folder / "coverage.csv", rows.to_csv(index=False))
    write_atomic(folder / "coverage-curve.csv", coverage_curve(table).to_csv(index=False, float_format="%.6g"))
    return rows


def random_spread(rows: pd.DataFrame) -> tuple[float, float] | None:
    """(mean, standard deviation) of coverage over the random layouts of a coverage table; None without any."""
    values = rows.loc[rows["strategy"].str.startswith("random-"), "coverage"]
    return (float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0) if len(values) else None
