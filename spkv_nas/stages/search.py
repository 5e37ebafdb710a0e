"""Commands as functions, continued from ``stages``: every budget of a range, how far probes agree, and the search."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.base.assets import EMBEDDED
from spkv_nas.base.errors import UserError
from spkv_nas.base.workspace import Workspace
from spkv_nas.proposal.agreement import agreement, parse_probe, write_agreement
from spkv_nas.proposal.budget import is_range, parse_budget, parse_budgets
from spkv_nas.proposal.budget_curve import write_budgets
from spkv_nas.proposal.constraints import solve
from spkv_nas.proposal.coverage import coverage
from spkv_nas.proposal.propose import propose, resolve_tau
from spkv_nas.proposal.requirements import Demand, budget_table, knee_row
from spkv_nas.proposal.stability import bootstrap
from spkv_nas.report.budget_charts import agreement_charts, budgets_chart
from spkv_nas.report.plot import save_chart
from spkv_nas.stages.all import Announce, _bar, _quiet, _silent, find_layouts, find_table
from spkv_nas.training.recipe import Recipe

if TYPE_CHECKING:
    from spkv_nas.search.driver import Search
    from spkv_nas.search.space import Space
    from spkv_nas.search.trials import Effort, Trial


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
    save_chart(folder, budgets_chart(rows, knee[0], num_domains=len(table.domains)))
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
    save_chart(folder, agreement_charts(rows))
    return folder, rows


def search_stage(
    workspace: Workspace,
    probe: str,
    budget: str,
    effort: Effort,
    *,
    start_files: list[Path] | None = None,
    other_files: list[Path] | None = None,
    recipe: Path | None = None,
    tau: str | None = None,
    window: int | None = None,
    demand: Demand | None = None,
    objective: str = "nll",
    calibration: str | None = None,
    hardware: str | None = None,
    storage: str | None = None,
    name: str | None = None,
    device: str | None = None,
    announce: Announce = _silent,
) -> tuple[Search, list[Trial], pd.DataFrame]:
    """Search for layouts, as one worker of possibly many; results are written to ``reports/<name>/``.

    Args:
        start_files: layouts to start from and compare with, beside the strategies'.
        other_files: layouts to compare with only.
        demand: its constraints hold; its context, batch, head dimension and dtype price the objective kv-bytes.
        objective: "nll", "nll,kv-bytes" or "nll,time" (decoding).
        calibration, hardware: where the time comes from, as in ``cost_stage``.

    Returns:
        The search, its trials, and their table.
    """
    import optuna

    from spkv_nas.report.figures import write_study_figures
    from spkv_nas.search.driver import Search
    from spkv_nas.search.results import write_results
    from spkv_nas.search.space import Space
    from spkv_nas.search.trials import LayoutCost
    from spkv_nas.stages.cost import find_times
    from spkv_nas.training.judge import RecipeJudge

    _quiet()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    demand = demand or Demand()
    second = _parse_objective(objective, demand.context)
    table = find_table(workspace, probe)
    numbers = parse_budgets(budget, table.num_heads) if is_range(budget) else [parse_budget(budget, table.num_heads)]
    if is_range(budget) and tau == "match-budget":
        raise UserError("--tau match-budget needs one budget, not a range: give the threshold as a number")
    table = resolve_tau(table, tau, numbers[0])
    window = window or table.window or DEFAULT_WINDOW
    space = Space(table, (numbers[0], numbers[-1]), window, demand.constraints)
    space.check()
    path = recipe or EMBEDDED / "search.yaml"
    parsed, name = Recipe.read(path), name or table.name
    starts = _starts(space, numbers)
    given, others = (find_layouts(workspace, name, files) if files else {} for files in (start_files, other_files))
    _check_given(space, starts, given, others)
    starts, others = _distinct({**starts, **given}, others, announce)
    workspace.check_writable()
    head = demand.cost(table, window) if second == "kv-bytes" else None
    judge = RecipeJudge.prepare(
        parsed, path.parent, workspace.run_dir(parsed.name),
        max_tokens=effort.max_tokens, short_steps=effort.short_steps, device=device, announce=announce,
    )  # fmt: skip
    cost = None
    if head is not None:
        cost = LayoutCost("KV bytes", lambda layout: float(head.total(layout.num_global, layout.num_heads)))
    elif second == "time" and (context := demand.context) is not None:
        times = find_times(
            workspace, name, judge.shape, [window], context,
            calibration=calibration, hardware=hardware, announce=announce,
        )  # fmt: skip
        cost = LayoutCost(
            f"decode seconds per token, {times.source}", lambda layout: times.layout_seconds(layout, context)
        )
    search = Search(
        judge, space, starts, others, effort, workspace.run_dir(name) / "search",
        name=name, cost=cost, storage=storage, announce=announce,
    )  # fmt: skip
    trials = search.run()
    folder = workspace.report_dir(name)
    rows = write_results(search, trials, folder, workspace.layout_dir(name) / "search")
    write_study_figures(folder, rows, None if cost is None else cost.name)
    return search, trials, rows


def _starts(space: Space, budgets: list[int]) -> dict[str, Layout]:
    """The strategies' layouts: of one budget those that meet the constraints; of a range the best of five budgets."""
    table, window = space.table, space.window
    if len(budgets) == 1:
        found = propose(table, budgets[0], window=window, num_random=0)
        del found["sparsest"]
        if space.constraints.named:
            found["constrained"] = solve(table, budgets[0], space.constraints, window=window)
    else:
        chosen = sorted({budgets[round(part * (len(budgets) - 1) / 4)] for part in range(5)})
        layouts = (solve(table, number, space.constraints, window=window) for number in chosen)
        found = {f"densest-{layout.num_global}": layout for layout in layouts}
    return {
        name: Layout(layout.heads, layout.window, name, layout.provenance)
        for name, layout in found.items()
        if space.contains(layout)
    }


def _check_given(
    space: Space, starts: Mapping[str, Layout], given: Mapping[str, Layout], others: Mapping[str, Layout]
) -> None:
    """Raises ``UserError`` for a name that is there twice, or a layout that cannot be tried or compared."""
    for key, layout in [*given.items(), *others.items()]:
        if key in starts or (key in given and key in others):
            raise UserError(f"two layouts are called '{key}': give them different names (the key 'strategy')")
        coverage(space.table, layout)  # refuses another grid
        if layout.window != space.window:
            raise UserError(
                f"layout '{key}' has a window of {layout.window}, the search one of {space.window}: give --window"
            )
        if key in given and not space.contains(layout):
            raise UserError(f"--start: layout '{key}' breaks the budget or a constraint; name it without --start")


def _distinct(
    starts: Mapping[str, Layout], others: Mapping[str, Layout], announce: Announce
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Both without the layouts that are there already, under another name."""
    names: dict[str, str] = {}
    parts: tuple[dict[str, Layout], dict[str, Layout]] = ({}, {})
    for kept, layouts in zip(parts, (starts, others), strict=True):
        for key, layout in layouts.items():
            if (same := names.setdefault(layout.content_hash, key)) != key:
                announce(f"{key} is the same layout as {same}: one of them is tried")
            else:
                kept[key] = layout
    return parts


def _parse_objective(objective: str, context: int | None) -> str | None:
    """The second objective, kv-bytes or time, of "nll,kv-bytes" or "nll,time"; None of "nll" alone."""
    names = [part.strip() for part in objective.split(",")]
    if names == ["nll"]:
        return None
    if names not in (["nll", "kv-bytes"], ["nll", "time"]):
        raise UserError(f"--objective '{objective}' is unknown; there are nll, nll,kv-bytes and nll,time")
    if context is None:
        raise UserError(f"--objective {objective} needs --context: the tokens per sequence")
    return names[1]
