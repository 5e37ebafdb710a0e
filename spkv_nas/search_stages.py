"""Commands as functions, continued from ``stages``: every budget of a range, and how far probes agree."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from spkv_nas.agreement import agreement, parse_probe, write_agreement
from spkv_nas.demand import Demand, budget_table, knee_row, write_budgets
from spkv_nas.density import DensityTable
from spkv_nas.errors import UserError
from spkv_nas.proposal import resolve_tau
from spkv_nas.report.search_figures import write_agreement_figure, write_budgets_figure
from spkv_nas.search.budget import parse_budget, parse_budgets
from spkv_nas.search.stability import bootstrap
from spkv_nas.stages import _bar, find_table
from spkv_nas.workspace import Workspace


def budgets_stage(
    workspace: Workspace,
    probe: str,
    budgets: str,
    *,
    tau: str | None = None,
    window: int | None = None,
    demand: Demand | None = None,
) -> tuple[DensityTable, pd.DataFrame, tuple[int, str]]:
    """The best layout at every budget of a range, written to ``layouts/<name>/budgets/`` with curve and figure.

    Returns:
        The table; the curve (``demand.budget_table``); the knee and what it is.
    """
    demand = demand or Demand()
    table = find_table(workspace, probe)
    numbers = parse_budgets(budgets, table.num_heads)
    table = resolve_tau(table, tau, numbers[0])
    with _bar("solving") as progress:
        rows, layouts = budget_table(
            table, numbers, demand, resampled=bootstrap(table), window=window, progress=progress
        )  # fmt: skip
    knee = knee_row(table, rows, demand)
    folder = workspace.layout_dir(table.name)
    write_budgets(folder, rows, layouts)
    write_budgets_figure(folder, rows, knee[0], num_domains=len(table.domains))
    return table, rows, knee


def compare_stage(
    workspace: Workspace, probes: list[str], budget: int | str, *, by: str | None = None, name: str | None = None
) -> tuple[Path, pd.DataFrame]:
    """How far probes, or with ``by`` the parts of each probe, agree on the heads to choose.

    Returns:
        The folder ``reports/<name>/`` (the first probe's name by default) and what ``agreement.csv`` in it holds.
    """
    tables: dict[str, DensityTable] = {}
    for probe in probes:
        for label, table in parse_probe(probe, lambda source: find_table(workspace, source), by):
            if label in tables:
                raise UserError(f"the probe '{label}' is named twice")
            tables[label] = table
    if len(tables) < 2:
        raise UserError("there is only one probe to compare: name another, or split it, --by domain or --by half")
    first = next(iter(tables.values()))
    rows = agreement(tables, parse_budget(budget, first.num_heads))
    folder = workspace.report_dir(name or first.name)
    write_agreement(folder, rows)
    write_agreement_figure(folder, rows)
    return folder, rows
