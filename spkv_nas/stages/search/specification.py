"""Make the specification of a search from its options and the files they name, without a model and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spkv_nas.artifacts.comparison import check_layout_names
from spkv_nas.artifacts.grid import check_grid
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.artifacts.proposal import Proposal, distinct
from spkv_nas.artifacts.windows import warn_of_separators, warn_of_windows
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Announce, Reporter
from spkv_nas.proposal.budget import parse_budget, parse_budgets
from spkv_nas.proposal.coverage import coverage
from spkv_nas.proposal.propose import MATCH_BUDGET, resolve_tau, unmatched
from spkv_nas.proposal.requirements import Requirements, asks_for_several
from spkv_nas.search.registry import SAMPLERS
from spkv_nas.search.space import Space
from spkv_nas.search.starts import starting_layouts
from spkv_nas.search.trials import Effort
from spkv_nas.stages.chosen import chosen_recipe, chosen_table
from spkv_nas.stages.lookup import find_table
from spkv_nas.stages.requirements import read_requirements
from spkv_nas.stages.search.options import SearchOptions
from spkv_nas.training.recipe import Recipe


@dataclass(frozen=True)
class _Candidates:
    """Layouts by name.

    Attributes:
        starts: layouts that the search starts from.
        others: layouts that it only compares with.
    """

    starts: dict[str, Layout]
    others: dict[str, Layout]


@dataclass(frozen=True)
class SearchSpecification:
    """Validated specification of a search, made without training.

    Attributes:
        requirements: constraints and cache that layouts are for.
        effort: trials, samplers and seeds.
        second_objective: second objective, "kv-bytes" or "time"; None without one.
        space: search space.
        file: path of the recipe.
        recipe: recipe to retrain layouts by.
        name: name of the results.
        candidates: layouts that the user or the strategies provide.
    """

    requirements: Requirements
    effort: Effort
    second_objective: str | None
    space: Space
    file: Path
    recipe: Recipe
    name: str
    candidates: _Candidates


def specify(options: SearchOptions, reporter: Reporter = SILENT) -> SearchSpecification:
    """Make a search's specification from its options. Raises ``UserError`` if they are invalid."""
    # Read the table and resolve its threshold
    requirements = read_requirements(options)
    second_objective = _parse_objective(options.objective, requirements)
    table = chosen_table(options, reporter)
    budgets = _budgets(options, table)
    table = resolve_tau(table, options.tau, budgets[0])
    if options.tau == MATCH_BUDGET and (unmatched_budget := unmatched(table, budgets[0])) is not None:
        reporter.caution(unmatched_budget)
    # Define the search space
    window = options.window or table.window or DEFAULT_WINDOW
    space = Space(
        table, (budgets[0], budgets[-1]), window, requirements.constraints.on(table), _signals(options, table)
    )
    space.check()
    windows = {f"signal {signal.name}": signal.window for signal in space.signals}
    sinks = {f"signal {signal.name}": signal.local_sinks for signal in space.signals}
    warn_of_windows(
        {"the search": window, **windows}, {"the search": space.sinks, **sinks}, remedy="probe all with one {}"
    )
    warn_of_separators({each.name: each.metadata for each in (table, *space.signals)})
    # Read the recipe
    file = chosen_recipe(options, table, "search.yaml")
    recipe = Recipe.read(file).with_precision(options.dtype)
    return SearchSpecification(
        requirements,
        _effort(options),
        second_objective,
        space,
        file,
        recipe,
        options.name or table.name,
        _candidates(options, space, budgets, reporter.announce),
    )


def _effort(options: SearchOptions) -> Effort:
    """Return how much to search and by which samplers. Raises ``UserError`` for an unknown sampler."""
    samplers = _kinds("--sampler", options.sampler)
    controls = [] if options.compare_samplers == "none" else _kinds("--compare-samplers", options.compare_samplers)
    return Effort(
        trials=options.trials,
        samplers=tuple(dict.fromkeys([*samplers, *controls])),
        seeds=tuple(range(options.seed, options.seed + options.seeds)),
        num_short=options.num_short,
        num_full=min(options.num_full, options.num_short),
        trials_per_round=options.trials_per_round,
    )


def _kinds(option: str, names: str) -> list[str]:
    """Split comma-separated samplers. Raises ``UserError`` for an unknown one."""
    kinds = [name.strip() for name in names.split(",")]
    if unknown_names := [kind for kind in kinds if kind not in SAMPLERS.names]:
        raise UserError(f"{option} '{unknown_names[0]}' is unknown; expected one of {', '.join(SAMPLERS.names)}")
    return kinds


def _signals(options: SearchOptions, table: HeadScores) -> tuple[HeadScores, ...]:
    """Read the tables of ``--signals``. Raises ``UserError`` if one is missing or has another grid."""
    signals = tuple(find_table(options.folders, probe) for probe in options.signals or ())
    for signal in signals:
        check_grid(f"--signals: '{signal.name}'", signal.grid, f"the density table '{table.name}'", table.grid)
    return signals


def _budgets(options: SearchOptions, table: HeadScores) -> list[int]:
    """Return the numbers of global heads to try, ascending. Raises ``UserError`` if invalid."""
    if asks_for_several(options.budget, options.tau):
        return parse_budgets(str(options.budget), table.num_candidates)
    return [parse_budget(options.budget, table.num_candidates)]


def _candidates(options: SearchOptions, space: Space, budgets: list[int], announce: Announce) -> _Candidates:
    """Collect the layouts to start from and to compare with; duplicates are dropped and announced."""
    starts = starting_layouts(space, budgets)
    user_starts, others = (Proposal.read(files or ()).layouts for files in (options.start, options.layouts))
    _check_given(space, starts, user_starts, others)
    return _distinct({**starts, **user_starts}, others, announce)


def _check_given(
    space: Space, starts: Mapping[str, Layout], user_starts: Mapping[str, Layout], others: Mapping[str, Layout]
) -> None:
    """Raise ``UserError`` for a duplicate or reserved name, or a layout outside the search space."""
    check_layout_names([*user_starts, *others])
    for key, layout in [*user_starts.items(), *others.items()]:
        if key in starts or (key in user_starts and key in others):
            raise UserError(f"two layouts are called '{key}': rename one of them (key 'strategy')")
        coverage(space.table, layout)  # raises for another grid
        if layout.window != space.window:
            raise UserError(
                f"layout '{key}' has a window of {layout.window} tokens, the search of {space.window}: set --window"
            )
        if layout.sinks != space.sinks:
            raise UserError(
                f"layout '{key}' has {layout.sinks} sink tokens, the search {space.sinks}, as its probe "
                f"'{space.table.name}'\nuse layouts of that probe, or layout convert --sinks {space.sinks}"
            )
        if key in user_starts and not space.contains(layout):
            raise UserError(
                f"--start: layout '{key}' does not meet the budget or a constraint: pass it without --start"
            )


def _distinct(starts: Mapping[str, Layout], others: Mapping[str, Layout], announce: Announce) -> _Candidates:
    """Drop layouts that equal another one of a different name."""
    names = distinct({**starts, **others})
    for first, *same in names.values():
        for key in same:
            announce(f"{key} and {first} are the same layout, which is tried once")
    return _Candidates(*({key: layout for key, layout in part.items() if key in names} for part in (starts, others)))


def _parse_objective(objective: str, requirements: Requirements) -> str | None:
    """Return the second objective of "nll,kv-bytes" or "nll,time"; None for "nll" alone."""
    names = [part.strip() for part in objective.split(",")]
    if requirements.serving is not None and names != ["nll", "kv-bytes"]:
        raise UserError(f"--engine applies to --objective nll,kv-bytes, not {objective}")
    if names == ["nll"]:
        return None
    if names not in (["nll", "kv-bytes"], ["nll", "time"]):
        raise UserError(f"--objective '{objective}' is unknown; expected nll, nll,kv-bytes or nll,time")
    if requirements.context is None:
        raise UserError(f"--objective {objective} needs --context, the number of tokens per sequence")
    return names[1]
